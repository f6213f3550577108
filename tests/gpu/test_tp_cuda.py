"""Tests of a model split over several GPUs, with peer memory or NCCL: all numbers equal those of one GPU.

The numbers are equal eagerly and in CUDA graphs. Each case runs in its own process, because a process can
join only one group in its life.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.gpu_ranks import NODES, PROMPT, Session, in_a_process, make_ranks_target
from support.engine.parallel_ranks import exit_codes
from test_families_cuda import SMALL as SMALL_MODEL
from test_families_cuda import TINY, write_checkpoint

from outrider.services.target.parallel.group import RankGroup, start_group
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.numerics import prepare_decoder
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.nn.open import load_decoder
from outrider.shared.parallel.lead_decoder import graph_observer

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

SIZES = [2, 4] if torch.cuda.device_count() >= 4 else [2]
REPLAYS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ranks_target(tmp_path_factory.mktemp("tp"))


def close(group: RankGroup) -> None:
    """Make all ranks leave together, so that none waits for another until it is killed."""
    begun = time.monotonic()
    group.close()
    print(f"closed in {time.monotonic() - begun:.1f} s")
    assert set(exit_codes(group)) == {0}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of three steps: the prompt, one row after it, and `NODES` rows after it.

    Lists have one entry per step.

    Attributes:
        errors: Relative errors of the ranks' logits against one GPU without quantisation.
        of_one: The same for one GPU with the ranks' settings.
        distances: Gaps of the ranks' greedy tokens to the best logits.
        differing: Graph replays that differ from the eager step.
        summed_by: The class with which the ranks sum.
    """

    errors: list[float]
    of_one: list[float]
    distances: list[float]
    differing: int
    summed_by: str


@torch.inference_mode()
def compare(folder: Path, size: int, dtype: str, reduce: str, quantization: str = "none") -> Comparison:
    """Run the same steps on one GPU and on several. Steps that never wait for the host also run in graphs.

    Only experts in fp32 wait for the host.
    """
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = TargetSettings.load(
        {
            "model": folder,
            "device": "cuda",
            "dtype": dtype,
            "tp": size,
            "tp_all_reduce": reduce,
            "quantization": quantization,
        }
    )
    group = start_group(settings)
    try:
        plain, one = (load_decoder(folder, "cuda:0", getattr(torch, dtype)) for _ in range(2))
        spread = Session(prepare_decoder(settings, group.decoder))
        sessions = (Session(plain), Session(prepare_decoder(settings, one)), spread)
        graphs = GraphCache(spread.device, observer=graph_observer(group.decoder))
        errors, of_one, distances, differing = [], [], [], 0
        for start, rows in ((0, PROMPT), (PROMPT, 1), (PROMPT, NODES)):
            found = []
            for session in sessions:
                tokens = session.tokens[start : start + rows].clone()
                found.append(session.run(start, rows, session.batch(start, rows), tokens))
            (want, _), (alone, _), (got, chosen) = found
            errors.append(float((got - want).norm() / want.norm()))
            of_one.append(float((alone - want).norm() / want.norm()))
            distances.append(float((got.amax(-1) - got.gather(1, chosen[:, None])[:, 0]).max()))
            if start == 0 or (plain.config.experts and dtype == "float32"):
                continue
            batch, tokens = spread.batch(start, rows), spread.tokens[start : start + rows].clone()

            def record(
                start: int = start,
                rows: int = rows,
                batch: AttentionBatch = batch,
                tokens: torch.Tensor = tokens,
            ) -> Any:
                return spread.run(start, rows, batch, tokens)

            for _ in range(REPLAYS):
                logits, token_ids = graphs.run((start, rows), record)
                differing += not (
                    torch.allclose(logits, got, rtol=1e-2, atol=1e-2) and torch.equal(token_ids, chosen)
                )
            # Run another prompt at the same addresses: the other ranks must read rank 0's new inputs.
            tokens.copy_(tokens.flip(0))
            logits, _ = graphs.run((start, rows), record)
            eager, _ = spread.run(start, rows, spread.batch(start, rows), tokens)
            differing += not torch.allclose(logits, eager, rtol=1e-2, atol=1e-2)
        graphs.clear()
        return Comparison(errors, of_one, distances, differing, type(group.decoder.reduce).__name__)
    finally:
        close(group)


@pytest.mark.parametrize(("dtype", "tolerance", "reduce"), [
    ("bfloat16", 3e-2, "auto"), ("float32", 1e-4, "auto"), ("float32", 1e-4, "one-shot"),
    ("bfloat16", 3e-2, "group"),
])  # fmt: skip
@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_those_of_one_gpu_eager_and_in_graphs(
    folder: Path, size: int, dtype: str, tolerance: float, reduce: str
) -> None:
    found = in_a_process(compare, folder, size, dtype, reduce)
    assert found.summed_by == {"group": "GroupReduce", "one-shot": "OneShotReduce"}.get(reduce, "PeerReduce")
    print(
        f"{size} GPUs, {dtype}, {reduce}: relative errors {found.errors}, "
        f"greedy tokens below the best by {found.distances}"
    )
    assert max(found.errors) < tolerance
    assert max(found.distances) <= (0 if dtype == "float32" else 0.1)
    assert found.differing == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1.0)])
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3"])
def test_experts_and_latents_are_those_of_one_gpu(
    family: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    """In bf16, near-ties of a router send rows to other experts, so graphs are compared with eager steps.

    On a CPU, such flips change the result by 0.16 of its norm.
    """
    path = write_checkpoint(tmp_path / "model", SMALL_MODEL | TINY[family], "cpu")
    found = in_a_process(compare, path, 2, dtype, "auto")
    print(
        f"2 GPUs, {family}, {dtype}: relative errors {found.errors}, "
        f"greedy tokens below the best by {found.distances}"
    )
    assert max(found.errors) < tolerance
    assert max(found.distances) <= (0 if dtype == "float32" else 0.1)
    assert found.differing == 0


def test_ranks_round_to_fp8_as_finely_as_one_gpu(folder: Path) -> None:
    """The scales of a part are never coarser than those of the whole, so the errors have the same size.

    The roundings differ. For one row, the ratio of the errors scatters by 0.07 around 1 in this model; for 24
    rows by 0.02 (rounded on a CPU, over 10 prompts).
    """
    found = in_a_process(compare, folder, 2, "bfloat16", "auto", "fp8")
    print(f"2 GPUs, FP8: relative errors {found.errors}, of one GPU {found.of_one}")
    assert min(found.of_one) > 0.05, "rounding must be visible"
    for rows, error, of_one in zip((PROMPT, 1, NODES), found.errors, found.of_one, strict=True):
        scatter = 0.3 if rows == 1 else 0.1
        assert 1 - scatter < error / of_one < 1 + scatter
    assert found.differing == 0


@torch.inference_mode()
def moved_rows(folder: Path, size: int, reduce: str) -> tuple[float, float]:
    """Return the change of one GPU's logits by a compaction, and the ranks' distance from these logits."""
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = TargetSettings.load(
        {"model": folder, "device": "cuda", "dtype": "float32", "tp": size, "tp_all_reduce": reduce}
    )
    group = start_group(settings)
    try:
        found = []
        for session in (
            Session(load_decoder(folder, "cuda:0", torch.float32)),
            Session(prepare_decoder(settings, group.decoder)),
        ):
            session.run(0, PROMPT + 4, session.batch(0, PROMPT + 4), session.tokens[: PROMPT + 4])
            before, _ = session.run(PROMPT + 2, 1, session.batch(PROMPT + 2, 1), session.tokens[:1])
            batch = session.batch(PROMPT, 4)
            path = torch.tensor(
                [[0, 3, -1, -1]], dtype=torch.int32, device=session.device
            )  # Node 3 moves to the place of node 1.
            session.pool.compact(
                batch.page_table,
                batch.prefix_lens,
                path,
                torch.ones(1, dtype=torch.int32, device=session.device),
            )
            after, _ = session.run(PROMPT + 2, 1, session.batch(PROMPT + 2, 1), session.tokens[:1])
            found.append((before, after))
        return float((found[0][1] - found[0][0]).norm()), float(
            (found[1][1] - found[0][1]).norm() / found[0][1].norm()
        )
    finally:
        close(group)


@pytest.mark.parametrize("reduce", ["auto", "group"])
@pytest.mark.parametrize("size", SIZES)
def test_accepted_rows_move_on_every_rank(folder: Path, size: int, reduce: str) -> None:
    change, error = in_a_process(moved_rows, folder, size, reduce)
    assert change > 1e-3, "the compaction must change the logits"
    assert error < 1e-4
