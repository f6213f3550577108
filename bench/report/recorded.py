"""Finds recorded results: picks the file and row that contain a given figure."""

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
        "shape", "device", "dtype", "weights", "transport", "draft_device", "tp", "prompt", "new_tokens",
        "repeats", "read_bandwidth_gbs", "matrix_rate_tflops", "mps", "draft_rounds",
    )
)  # fmt: skip
"""Settings that every run of `outrider bench latency` records. All others come from ``--set``."""
IRRELEVANT_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "NCCL_VERSION", "TRITON_CACHE_DIR")
"""Environment variables that contain paths or versions and do not affect figures.

The pipe directory is one of them, because the setting `mps` already records whether MPS was used.
"""
PROFILED = ("gpu_idle", "gpu_idle_between")
"""Fields recorded only with ``--profile``, which measures every round once."""
COMMIT_DIGITS = 7
SESSION_FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}T\d{4}Z")
"""Folder of a measuring session of a peer and Outrider on the same GPUs, named by its start time."""
OFF = ("false", "none", "auto")
"""Values of a setting that leave the default behaviour unchanged."""


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """One result file."""

    path: Path
    content: Mapping[str, Any]

    @property
    def date(self) -> datetime:
        """Time of the measurement; the epoch if the file has no date, or one in another format."""
        try:
            recorded = datetime.fromisoformat(str(self.content.get("date", "")))
        except ValueError:
            return datetime.fromtimestamp(0, UTC)
        return recorded if recorded.tzinfo else recorded.replace(tzinfo=UTC)

    def settings(self, name: str) -> Any:
        """Return one of the run's settings, or None."""
        return self.content.get("settings", {}).get(name)

    @property
    def changes(self) -> dict[str, Any]:
        """Settings of the run that differ from the defaults."""
        settings: Mapping[str, Any] = self.content.get("settings", {})
        return {
            name: value
            for name, value in settings.items()
            if name not in PLAIN_SETTINGS and str(value).lower() not in OFF
        }

    @property
    def gpu(self) -> str | None:
        """Id of the GPU that did the work; None if the file does not record it."""
        ids: Sequence[str] = self.content.get("machine", {}).get("gpu_ids", ())
        index = int(str(self.settings("device")).partition(":")[2] or 0)
        return ids[index] if index < len(ids) else None

    def distance(self, other: RecordedResult) -> tuple[bool, bool, bool, timedelta]:
        """Return how different the circumstances of two runs are, as a sort key.

        The GPU comes first, because two GPUs of the same model differ by several percent. Next come the
        visible GPUs, then the usable cores, then the time between the runs.
        """
        mine, others = (recorded.content.get("machine", {}) for recorded in (self, other))
        gpus, cores = (
            mine.get("gpu_ids") != others.get("gpu_ids"),
            mine.get("cores_used") != others.get("cores_used"),
        )
        return self.gpu != other.gpu, gpus, cores, abs(self.date - other.date)

    @property
    def command(self) -> str:
        """Command line of the run, preceded by the environment variables that affect figures."""
        environment: Mapping[str, str] = self.content.get("environment", {})
        variables = [
            f"{name}={value}" for name, value in environment.items() if name not in IRRELEVANT_VARIABLES
        ]
        return " ".join((*variables, *map(str, self.content.get("command", ()))))

    @property
    def provenance(self) -> str:
        """Time, machine and commit of the measurement, as far as they are recorded.

        Example: ``2026-11-21 15:00 UTC, GPU 29f2f6ee, 16 of 64 cores, commit 2ea2987``.
        """
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
                + (" with uncommitted changes" if source.get("modified") else "")
            )
        return ", ".join(parts)

    @property
    def under_mps(self) -> bool:
        """Whether the processes shared the GPU through MPS."""
        return bool(self.settings("mps"))

    def row(self, case: str) -> Mapping[str, Any] | None:
        """Return the figures of a case, or None."""
        return next((row for row in self.content.get("rows", ()) if row.get("case") == case), None)


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """One file with a peer's runs, as its own benchmark script wrote them."""

    path: Path
    lines: Sequence[Mapping[str, Any]]

    @property
    def command(self) -> str:
        """Command line of the run; empty if not recorded."""
        return str(self._about.get("command", ""))

    @property
    def provenance(self) -> str:
        """Time and machine of the run; empty if not recorded."""
        recorded = [str(self._about[name]) for name in ("date", "gpu", "beside") if name in self._about]
        return "; ".join(recorded)

    @property
    def date(self) -> str:
        """Date of the run in a sortable form; empty if not recorded."""
        return str(self._about.get("date", ""))

    @property
    def _about(self) -> Mapping[str, Any]:
        return next((line for line in self.lines if line.get("case") == "machine"), {})


class Results:
    """All results recorded in a folder.

    If several files fit a query, the latest one is returned, or the one closest to the argument `near`.

    A subfolder named by a time contains results of one measuring session with a peer. Comparisons with that
    peer search its session's folder first.

    Raises:
        ConfigurationError: A file is not valid JSON.
    """

    def __init__(self, folder: Path) -> None:
        places = (folder, *sorted(path for path in folder.iterdir() if SESSION_FOLDER.fullmatch(path.name)))
        found = (recorded for place in places for recorded in _recorded(place))
        self._files = sorted(found, key=lambda recorded: recorded.date, reverse=True)
        peer_files = [path for place in places for path in sorted(place.glob("vllm*.jsonl"), reverse=True)]
        self._peers = sorted(
            (PeerFigures(path, read_lines(path)) for path in peer_files),
            key=lambda peer: peer.date,
            reverse=True,
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
        """Return the latest `outrider bench latency` file on a GPU that has the case, and the case's row.

        Profiled runs are used only for idle shares.

        Args:
            case: Case of the row.
            needs: Field that the row must have.
            changes: All non-default settings that the run must have.
            mps: Whether the run used MPS.
            near: Return the file measured closest to this one instead (`RecordedResult.distance`).
            beside: Prefer the file from this peer's measuring session, if it has the case.
            settings: Settings that the run must have. By default: in-process, on one GPU.
        """
        here = {"shape": SHAPE, "prompt": 512, "new_tokens": 384, "draft_device": None, "tp": None}
        wanted = {
            "transport": ("inproc", "none"),
            **{name: (value,) for name, value in (here | settings).items()},
        }

        def fits(recorded: RecordedResult) -> bool:
            counts = needs in PROFILED or not recorded.content.get("profiles")
            return counts and recorded.changes == (changes or {}) and recorded.under_mps == mps

        session = (
            []
            if beside is None
            else [recorded for recorded in self._files if recorded.path.parent == beside.path.parent]
        )
        return self._latest("latency", case, wanted, needs, fits, near, files=session) or self._latest(
            "latency", case, wanted, needs, fits, near
        )

    def profiled(self) -> RecordedResult | None:
        """Return the latest `outrider bench latency --profile` file on a GPU, for the shape of the goals."""
        for recorded in self._files:
            if (
                recorded.content.get("profiles")
                and str(recorded.settings("device")).startswith("cuda")
                and recorded.settings("shape") == SHAPE
            ):
                return recorded
        return None

    def perplexity(self, case: str) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the latest `outrider bench perplexity` result on the GSM8K text, on any device."""

        def fits(recorded: RecordedResult) -> bool:
            return str(recorded.settings("text")).startswith("gsm8k")

        return self._latest("perplexity", case, {}, "increase_percent", fits, device="")

    def kernels(self, case: str) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the latest `outrider bench kernels` result on a GPU that has the case."""
        return self._latest("kernels", case, {"shape": (SHAPE,)}, "value")

    def starts(self) -> Sequence[RecordedResult]:
        """Return the `outrider bench serve` files that record a stack's startup time, oldest first."""
        fits = (
            recorded
            for recorded in self._files
            if recorded.content.get("benchmark") == "serve" and recorded.content.get("start")
        )
        return list(fits)[::-1]

    def latest(self, benchmark: str, case: str | None = None) -> RecordedResult | None:
        """Return the latest file of another benchmark on a GPU; with `case`, the latest that has it."""
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
        """Return the latest `outrider bench speculation` file called `name`, and its greedy summary."""
        for recorded in self._files:
            if recorded.path.name == name and recorded.content.get("summary"):
                return recorded, recorded.content["summary"][0]
        return None

    def vllm(self, config: str, batch: int) -> tuple[PeerFigures, Mapping[str, Any]] | None:
        """Return the latest vLLM file with a configuration and batch size, and its first run of them.

        A vLLM file (``vllm*.jsonl``) starts with our line about the time and machine, followed by the lines
        of vLLM's own script.
        """
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
    """Return the content of a result file; empty if it is not a JSON object.

    Raises:
        ConfigurationError: The file is not valid JSON.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.", field="--results") from None
    return content if isinstance(content, dict) else {}


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the JSON objects of a file, one per line; other lines are skipped."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")
    ]
