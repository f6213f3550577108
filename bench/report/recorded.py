"""Recorded results by what was measured: which file and row a figure is found in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import ConfigurationError

SHAPE = "llama3.1-8b"
PLAIN_SETTINGS = frozenset(
    (
        "shape", "device", "dtype", "weights", "transport", "draft_device", "tp", "prompt", "new_tokens", "repeats", "read_bandwidth_gbs",
        "matrix_rate_tflops", "mps", "draft_rounds",
    )
)  # fmt: skip
"""What every run of `outrider bench latency` tells; a run that tells more was told to compute otherwise (``--set``)."""
NO_MATTER = ("CUDA_MPS_PIPE_DIRECTORY", "NCCL_VERSION", "TRITON_CACHE_DIR")
"""Variables of an environment that name places or versions and change no figure: `mps` in the settings says what pipes are for."""
PROFILED = ("gpu_idle", "gpu_idle_between")
"""What only a run with ``--profile`` tells, which measures every round once."""
COMMIT_DIGITS = 7
CALL = re.compile(r"\d{4}-\d{2}-\d{2}T\d{4}Z")
"""How the folder of a call is named: by when it began."""
OFF = ("false", "none", "auto")
"""Values of such a setting that change nothing."""


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """One file of results."""

    path: Path
    content: Mapping[str, Any]

    @property
    def date(self) -> datetime:
        """When it was measured; long ago in a file that does not tell, or not as a benchmark does."""
        try:
            told = datetime.fromisoformat(str(self.content.get("date", "")))
        except ValueError:
            return datetime.fromtimestamp(0, UTC)
        return told if told.tzinfo else told.replace(tzinfo=UTC)

    def settings(self, name: str) -> Any:
        """Return one of its settings, or None."""
        return self.content.get("settings", {}).get(name)

    @property
    def changes(self) -> dict[str, Any]:
        """What the run was told to do otherwise than by default."""
        settings: Mapping[str, Any] = self.content.get("settings", {})
        return {
            name: value
            for name, value in settings.items()
            if name not in PLAIN_SETTINGS and str(value).lower() not in OFF
        }

    @property
    def gpu(self) -> str | None:
        """The id of the GPU that computed; None in files that do not tell."""
        ids: Sequence[str] = self.content.get("machine", {}).get("gpu_ids", ())
        index = int(str(self.settings("device")).partition(":")[2] or 0)
        return ids[index] if index < len(ids) else None

    def distance(self, other: RecordedResult) -> tuple[bool, bool, bool, timedelta]:
        """Return how far apart two runs are: by GPU first, as two of a kind differ by percents, then by what else they had (GPUs that they
        saw, cores that they might use), then in time."""
        mine, others = (recorded.content.get("machine", {}) for recorded in (self, other))
        gpus, cores = (
            mine.get("gpu_ids") != others.get("gpu_ids"),
            mine.get("cores_used") != others.get("cores_used"),
        )
        return self.gpu != other.gpu, gpus, cores, abs(self.date - other.date)

    @property
    def command(self) -> str:
        """What was run, behind the variables of its environment that bear on figures."""
        environment: Mapping[str, str] = self.content.get("environment", {})
        variables = [f"{name}={value}" for name, value in environment.items() if name not in NO_MATTER]
        return " ".join((*variables, *map(str, self.content.get("command", ()))))

    @property
    def occasion(self) -> str:
        """When and on what it was measured, as far as the file tells: ``2026-11-21 15:00 UTC, GPU 29f2f6ee, 16 of 64 cores, commit
        2ea2987``."""
        machine: Mapping[str, Any] = self.content.get("machine", {})
        ids: Sequence[str] = machine.get("gpu_ids", ())
        gpu = f"GPU {' and '.join(ids)}" if ids else "an H200" if machine.get("gpus") else "CPU"
        used, cores = machine.get("cores_used"), machine.get("cores")
        parts = [f"{self.date:%Y-%m-%d %H:%M} UTC", gpu]
        if cores is not None:
            parts.append(f"{used} of {cores} cores" if used not in (None, cores) else f"{cores} cores")
        if self.under_mps and "--mps" not in self.content.get("command", ()):
            parts.append("with `nvidia-cuda-mps-control -d` running")
        source: Mapping[str, Any] = self.content.get("source", {})
        if source.get("commit"):
            parts.append(
                f"commit {source['commit'][:COMMIT_DIGITS]}"
                + (" with changes" if source.get("modified") else "")
            )
        return ", ".join(parts)

    @property
    def under_mps(self) -> bool:
        """Whether the processes shared the GPU through the multi-process service."""
        return bool(self.settings("mps"))

    def row(self, case: str) -> Mapping[str, Any] | None:
        """Return the figures of a case, or None."""
        return next((row for row in self.content.get("rows", ()) if row.get("case") == case), None)


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One file of a peer's runs, by its own script."""

    path: Path
    lines: Sequence[Mapping[str, Any]]

    @property
    def command(self) -> str:
        """What was run; empty in files that do not tell."""
        return str(self._about.get("command", ""))

    @property
    def occasion(self) -> str:
        """When and on what, likewise."""
        told = [str(self._about[name]) for name in ("date", "gpu", "beside") if name in self._about]
        return "; ".join(told)

    @property
    def date(self) -> str:
        """When, sortable; empty likewise."""
        return str(self._about.get("date", ""))

    @property
    def _about(self) -> Mapping[str, Any]:
        return next((line for line in self.lines if line.get("case") == "machine"), {})


class Results:
    """All recorded results of a folder on one kind of device; of several that fit, the latest counts, or the one `near` another.

    A folder within it that is named by a time holds what ran beside a peer in one call: comparisons with that peer look there first.

    Raises:
        ConfigurationError: A file is not JSON.
    """

    def __init__(self, folder: Path) -> None:
        places = (folder, *sorted(path for path in folder.iterdir() if CALL.fullmatch(path.name)))
        found = (recorded for place in places for recorded in _recorded(place))
        self._files = sorted(found, key=lambda recorded: recorded.date, reverse=True)
        told = [path for place in places for path in sorted(place.glob("vllm*.jsonl"), reverse=True)]
        self._peers = sorted(
            (PeerFigures(path, read_lines(path)) for path in told), key=lambda peer: peer.date, reverse=True
        )

    def latency(
        self,
        case: str,
        needs: str = "value",
        *,
        changes: Mapping[str, Any] | None = None,
        mps: bool = False,
        near: RecordedResult | None = None,
        beside: PeerFigures | None = None,
        **settings: Any,
    ) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the latest file of `outrider bench latency` on a GPU that has the case, and its row; profiled runs are for idle shares.

        Args:
            case: Of the row.
            needs: What the row must tell.
            changes: What the run was told to compute otherwise, all of it.
            mps: Whether it ran under the multi-process service.
            near: Take the file that was measured closest to this one, see `RecordedResult.distance`.
            beside: Take the file of the call in which this peer ran, if that has the case.
            settings: Of the run; in process, on one GPU, unless they say otherwise.
        """
        here = {"shape": SHAPE, "prompt": 512, "new_tokens": 384, "draft_device": None, "tp": None}
        wanted = {
            "transport": ("inproc", "none"),
            **{name: (value,) for name, value in (here | settings).items()},
        }

        def fits(recorded: RecordedResult) -> bool:
            counts = needs in PROFILED or not recorded.content.get("profiles")
            return counts and recorded.changes == (changes or {}) and recorded.under_mps == mps

        call = (
            []
            if beside is None
            else [recorded for recorded in self._files if recorded.path.parent == beside.path.parent]
        )
        return self._latest("latency", case, wanted, needs, fits, near, files=call) or self._latest(
            "latency", case, wanted, needs, fits, near
        )

    def profiled(self) -> RecordedResult | None:
        """Return the latest file of `outrider bench latency --profile` on a GPU, of the shape that is promised for."""
        for recorded in self._files:
            if (
                recorded.content.get("profiles")
                and str(recorded.settings("device")).startswith("cuda")
                and recorded.settings("shape") == SHAPE
            ):
                return recorded
        return None

    def perplexity(self, case: str) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the same of `outrider bench perplexity` on GSM8K's text, on any device."""

        def fits(recorded: RecordedResult) -> bool:
            return str(recorded.settings("text")).startswith("gsm8k")

        return self._latest("perplexity", case, {}, "increase_percent", fits, device="")

    def kernels(self, case: str) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the same of `outrider bench kernels`."""
        return self._latest("kernels", case, {"shape": (SHAPE,)}, "value")

    def starts(self) -> Sequence[RecordedResult]:
        """Return the files of `outrider bench serve` that tell how long the start of a stack took, in the order of their dates."""
        fits = (
            recorded
            for recorded in self._files
            if recorded.content.get("benchmark") == "serve" and recorded.content.get("start")
        )
        return list(fits)[::-1]

    def latest(self, benchmark: str, case: str | None = None) -> RecordedResult | None:
        """Return the latest file of another benchmark on a GPU, or the latest that has a case."""
        for recorded in self._files:
            on_a_gpu = str(recorded.settings("device")).startswith("cuda") or bool(
                recorded.content.get("machine", {}).get("gpus")
            )
            if (
                recorded.content.get("benchmark") == benchmark
                and on_a_gpu
                and (case is None or recorded.row(case) is not None)
            ):
                return recorded
        return None

    def summary(self, name: str) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the greedy summary of the latest `outrider bench speculation` that was recorded in `name`."""
        for recorded in self._files:
            if recorded.path.name == name and recorded.content.get("summary"):
                return recorded, recorded.content["summary"][0]
        return None

    def vllm(self, config: str, batch: int) -> tuple[PeerFigures, Mapping[str, Any]] | None:
        """Return the latest file that has a configuration of vLLM's (``vllm*.jsonl``: a line of ours that tells
        when and where, then those of its script), and its first run of it."""
        wanted = {"case": "run", "config": config, "bs": batch}
        for peer in self._peers:
            for line in peer.lines:
                if wanted.items() <= line.items():
                    return peer, line
        return None

    def _latest(
        self,
        benchmark: str,
        case: str,
        settings: Mapping[str, tuple[Any, ...]],
        needs: str,
        fits: Callable[[RecordedResult], bool] = lambda _: True,
        near: RecordedResult | None = None,
        device: str = "cuda",
        files: Sequence[RecordedResult] | None = None,
    ) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        files = self._files if files is None else files
        files = files if near is None else sorted(files, key=near.distance)
        for recorded in files:
            if recorded.content.get("benchmark") != benchmark or not str(
                recorded.settings("device")
            ).startswith(device):
                continue
            row = recorded.row(case)
            alike = all(recorded.settings(name) in allowed for name, allowed in settings.items()) and fits(
                recorded
            )
            if alike and row is not None and row.get(needs) is not None:
                return recorded, row
        return None


def _recorded(folder: Path) -> list[RecordedResult]:
    return [RecordedResult(path, read_result(path)) for path in sorted(folder.glob("*.json"))]


def read_result(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}.", field="--results") from None
    return content if isinstance(content, dict) else {}


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")
    ]
