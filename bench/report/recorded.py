"""Searches recorded results: finds the result file and the row that contain a given figure."""

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
"""Settings that every run of `outrider bench latency` records. All other settings come from ``--set``."""
IRRELEVANT_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "NCCL_VERSION", "TRITON_CACHE_DIR")
"""Environment variables that contain paths or versions and do not affect figures.

The MPS pipe directory is listed because the setting `mps` already records whether MPS was used.
"""
PROFILED = ("gpu_idle", "gpu_idle_between")
"""Fields that are recorded only with ``--profile``. A profiled run measures every round only once."""
COMMIT_DIGITS = 7
SESSION_FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}T\d{4}Z")
"""Folder name of a measuring session: its start time. A session runs a peer and Outrider on the same GPUs."""
OFF = ("false", "none", "auto")
"""Values of a setting that mean the default behaviour."""


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """One result file."""

    path: Path
    content: Mapping[str, Any]

    @property
    def date(self) -> datetime:
        """Time of the measurement, or the Unix epoch if the file has no date in the expected format."""
        try:
            recorded = datetime.fromisoformat(str(self.content.get("date", "")))
        except ValueError:
            return datetime.fromtimestamp(0, UTC)
        return recorded if recorded.tzinfo else recorded.replace(tzinfo=UTC)

    def settings(self, name: str) -> Any:
        """Return the named setting of the run, or None."""
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
        """Id of the GPU that did the work. None if the file does not record the id."""
        ids: Sequence[str] = self.content.get("machine", {}).get("gpu_ids", ())
        index = int(str(self.settings("device")).partition(":")[2] or 0)
        return ids[index] if index < len(ids) else None

    def distance(self, other: RecordedResult) -> tuple[bool, bool, bool, timedelta]:
        """Return a sort key for two recorded runs. Runs under more similar circumstances have a smaller key.

        The identity of the GPU counts most, because two GPUs of the same model differ by several percent. The
        visible GPUs, the usable cores and the time between the runs count next, in this order.
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
        """Time, machine and commit of a recorded measurement, as text. Unrecorded parts are left out.

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
    """One file of a peer's runs, as the peer's own benchmark script wrote it."""

    path: Path
    lines: Sequence[Mapping[str, Any]]

    @property
    def command(self) -> str:
        """Command line of the run. Empty if the file does not record it."""
        return str(self._about.get("command", ""))

    @property
    def provenance(self) -> str:
        """Time and machine of the run. Empty if the file does not record them."""
        recorded = [str(self._about[name]) for name in ("date", "gpu", "beside") if name in self._about]
        return "; ".join(recorded)

    @property
    def date(self) -> str:
        """Date of the run in a sortable form. Empty if the file does not record the date."""
        return str(self._about.get("date", ""))

    @property
    def _about(self) -> Mapping[str, Any]:
        return next((line for line in self.lines if line.get("case") == "machine"), {})


class Results:
    """All benchmark results recorded in a folder.

    If several files match a query, the latest file is used. A query with an argument `near` instead uses the
    file whose machine and time are closest to those of the file `near`.

    A subfolder whose name is a time contains the results of one session. In that session, another server (a
    peer) was measured too. A comparison with the peer's figure searches the subfolder of that session first.

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
        """Return the latest GPU result of `outrider bench latency` that has a given case, and the case's row.

        Profiled runs are used only to find idle shares, i.e. if `needs` is one of `PROFILED`.

        Args:
            case: Case of the row.
            needs: Name of a field that the row must have. Empty for none.
            changes: All settings of the run that differ from the defaults.
            mps: True for a run with NVIDIA's multi-process service (MPS), False for a run without it.
            near: A result. The file that was recorded under the most similar circumstances is preferred to
                the latest file.
            beside: A file of another server (a peer). A file of the same session is preferred, if there is
                one with this case.
            settings: Settings that the run must have. By default, these are an in-process draft and one GPU.
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
        """Return the latest `outrider bench latency --profile` file on a GPU for the goals' model shape."""
        for recorded in self._files:
            if (
                recorded.content.get("profiles")
                and str(recorded.settings("device")).startswith("cuda")
                and recorded.settings("shape") == SHAPE
            ):
                return recorded
        return None

    def perplexity(self, case: str) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the latest `outrider bench perplexity` file on the GSM8K text, on any device."""

        def fits(recorded: RecordedResult) -> bool:
            return str(recorded.settings("text")).startswith("gsm8k")

        return self._latest("perplexity", case, {}, "increase_percent", fits, device="")

    def kernels(self, case: str) -> tuple[RecordedResult, Mapping[str, Any]] | None:
        """Return the latest `outrider bench kernels` file on a GPU that has the case, and the case's row."""
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
        """Return the latest file of this benchmark that was measured on a GPU and has `case`, if given."""
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
        """Return the latest vLLM file with a run of a configuration and batch size, and the first such run.

        A vLLM file is named ``vllm*.jsonl``. Its first line describes the time and the machine. The other
        lines are the output of vLLM's own benchmark script.
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
    """Return the content of a result file. If the file contains no JSON object, return an empty mapping.

    Raises:
        ConfigurationError: The file is not valid JSON.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.", field="--results") from None
    return content if isinstance(content, dict) else {}


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the JSON objects of a file that has one object per line. Other lines are skipped."""
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")
    ]
