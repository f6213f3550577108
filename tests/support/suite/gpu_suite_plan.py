"""The jobs of the GPU suite: which test files run together, on which lanes, and with how many workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
LANES = 4
"""Number of lanes. A lane is a share of the cores together with a GPU. It runs one job at a time."""
MOST_WORKERS = 14
"""Maximum number of pytest-xdist workers of a job."""

ROUNDS_ELSEWHERE = "law/test_equality_rounds_remote.py"
FIRST_LAWS = tuple(f"law/test_{name}.py" for name in (
    "heads_trained", "equality_draft", "drafter_mtp", "equality_device_pair", "drafter_standalone",
    "equality_decode_loop", "heads_tree", "heads_remote", "drafter_ngram", "noise_position", "philox",
))  # fmt: skip
"""About two fifths of the laws by run time. The laws that train a model are at the front."""
OTHER_LAWS = tuple(f"law/test_{name}.py" for name in (
    "doctor_trained", "mutations", "drafter_mtp_deepseek", "family_output", "joins", "draft_gaps",
    "demo_pair", "equality_engine",
))  # fmt: skip
"""About a third of the laws by run time."""
MORE_LAWS_FIRST = ("mixed_rounds", "mixed_rounds_remote", "prefix_cache", "forms", "parity_check")
"""The longest of the remaining laws, to be started first."""
FIRST_KERNELS = (
    "mixed_rounds_cuda", "families_cuda", "tile_trial_cuda", "decode_loop_cuda", "compile_cuda", "drafters",
    "layer_kernels_cuda", "draft_graph_cuda", "deterministic_cuda", "kernels",
)  # fmt: skip
"""Long kernel tests, to be started first."""
SOAK, TEXTS, MPS, FLASHINFER, PREFIXES = (
    f"gpu/test_{name}_cuda.py" for name in ("soak", "text_bf16", "mps", "flashinfer", "prefix_parity")
)
WITH_FLASHINFER = (FLASHINFER, PREFIXES)
"""Files that contain tests marked `flashinfer`."""
RANKS, SERVED_RANKS = "gpu/test_tp_cuda.py", "gpu/test_tp_serving_cuda.py"
TWO_TARGETS = "gpu/test_many_targets_cuda.py"
SERVED, SERVED_BF16 = "gpu/test_serving.py", "gpu/test_serving_bf16.py"
QUIET = tuple(
    f"gpu/test_{name}_cuda.py"
    for name in ("ipc", "ipc_rounds", "bench", "exchange", "launch_counts", "relay")
)
"""Tests that wait for other processes or that measure. They use two GPUs if the machine has two."""
APART = (SOAK, TEXTS, MPS, RANKS, SERVED_RANKS, TWO_TARGETS, SERVED, SERVED_BF16, *QUIET)


@dataclass(frozen=True, slots=True)
class Job:
    """One run of pytest.

    Attributes:
        name: Name of the job, for logs and the report.
        lanes: Lanes whose cores and GPUs the job uses. It starts when earlier jobs have left all its lanes.
        workers: Number of pytest-xdist processes. With 1, pytest runs without pytest-xdist.
        arguments: Test files, relative to `tests`, and options of pytest.
        law: True for tests that run on the device in `OUTRIDER_TEST_DEVICE`.
        library: True if the job needs FlashInfer.
    """

    name: str
    lanes: tuple[int, ...]
    workers: int
    arguments: tuple[str, ...]
    law: bool = False
    library: bool = False

    @property
    def files(self) -> list[str]:
        return [argument for argument in self.arguments if argument.endswith(".py")]


def rest(folder: str, first: tuple[str, ...], without: tuple[str, ...]) -> tuple[str, ...]:
    """Return the test files of a folder without those in `without`. The files named in `first` come first."""
    order = {f"{folder}/test_{name}.py": place for place, name in enumerate(first)}
    found = [f"{folder}/{path.name}" for path in sorted((TESTS / folder).glob("test_*.py"))]
    return tuple(
        sorted((path for path in found if path not in without), key=lambda path: order.get(path, len(order)))
    )


def plan(gpus: int, cores: int) -> list[Job]:
    """Return all jobs in the order in which lanes start them. Each lane has `cores` cores."""
    many, few, pair = (
        max(1, min(MOST_WORKERS, cores - 1)),
        max(1, min(7, cores // 2)),
        max(1, min(8, cores - 2)),
    )
    more_laws = rest("law", MORE_LAWS_FIRST, (*FIRST_LAWS, *OTHER_LAWS, ROUNDS_ELSEWHERE))
    kernels = ("-m", "gpu and not flashinfer", *rest("gpu", FIRST_KERNELS, APART))
    ranks = ("-m", "multi_gpu", "-k", "not [4-", RANKS, SERVED_RANKS, TWO_TARGETS)
    jobs = [Job("two ranks", (0, 1), pair, ranks)] if gpus > 1 else []
    jobs += [
        Job("quiet", (2, 3), pair, QUIET),
        Job("laws", (0,), many, FIRST_LAWS, law=True),
        Job("flashinfer", (1,), min(4, few), ("-m", "flashinfer", *WITH_FLASHINFER), library=True),
        Job("kernels", (2,), many, kernels),
        Job("other laws", (3,), many, OTHER_LAWS, law=True),
        Job("more laws", (1,), many, more_laws, law=True),
        Job("soak", (0,), 1, (SOAK,)),
        Job("texts", (1,), min(4, few), (TEXTS,)),
        Job("rounds elsewhere", (3,), few, (ROUNDS_ELSEWHERE,), law=True),
        Job("served", (2,), 1, (SERVED, SERVED_BF16, MPS)),
    ]
    if gpus > 3:
        jobs.append(Job("four ranks", (0, 1, 2, 3), few, ("-m", "multi_gpu", "-k", "[4-", RANKS)))
    return jobs
