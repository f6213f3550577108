"""Chooses where the draft of `outrider up` runs, and how the target reaches it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.services.stack.options import StackOptions, Transport
from outrider.shared.spec.algorithm import Algorithm

QUERY_TIMEOUT_S = 20.0
IDLE_BYTES = 1 << 30
"""Largest memory in use of a GPU that counts as idle."""
MOST_MEASURED_REQUESTS = 1
"""Largest number of concurrent requests for which `--transport auto` runs the draft on a second GPU.

With one request, a measured round with the draft on a second GPU takes 0.99 times as long as a round with the
draft in the target's process. For more requests, the `ipc:` transport was slower or was not measured.
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use.

    Attributes:
        index: Number of the GPU in this process, as in ``cuda:N``.
        free, total: Free memory and total memory, in bytes.
    """

    index: int
    free: int
    total: int

    @property
    def is_idle(self) -> bool:
        """True if no process seems to use the GPU."""
        return self.total - self.free <= IDLE_BYTES


@dataclass(frozen=True, slots=True)
class DraftPlacement:
    """The process and the device in which the draft runs.

    Attributes:
        transport: How the target connects to the draft; never AUTO.
        draft_device: Device of a draft with its own process, in the notation of `--device`.
        why: The reason for the choice, for the log.
        on_gpu: True if the services use a GPU, for the log.
    """

    transport: Transport
    draft_device: str
    why: str
    on_gpu: bool = False

    @property
    def inproc(self) -> bool:
        """True if the draft runs in the target's process."""
        return self.transport is Transport.INPROC

    def __str__(self) -> str:
        if self.inproc:
            return f"the draft runs in the target's process: {self.why}"
        kind, _, index = self.draft_device.partition(":")
        known = {"cpu": "the CPU", "auto": "the GPU" if self.on_gpu else "the CPU"}
        device = f"GPU {index} ({self.draft_device})" if index else known.get(kind, "the GPU")
        return f"the draft runs in its own process on {device}, over {self.transport.value}: {self.why}"


def place_draft(options: StackOptions, gpus: Sequence[Gpu]) -> DraftPlacement:
    """Choose the process and the device for the draft of a stack. Call only if speculation is enabled.

    An explicit `--transport` decides. Without it, the draft normally runs in the target's process. On a CPU,
    the draft gets its own process. It also gets its own process on an idle second GPU, if a draft there is
    known to be at least as fast as in the target's process.

    Args:
        options: Options of `outrider up`.
        gpus: The GPUs that torch can use; see `usable_gpus`.
    """
    on_gpu = options.device != "cpu" and bool(gpus)
    return replace(_choose(options, gpus, on_gpu), on_gpu=on_gpu)


def _choose(options: StackOptions, gpus: Sequence[Gpu], on_gpu: bool) -> DraftPlacement:
    beside = _idle_gpu(options, gpus) if on_gpu and not options.mps else None
    device = options.draft_device if options.draft_device != "auto" else beside or options.device
    if options.transport is not Transport.AUTO:
        why = options.why_transport or f"--transport {options.transport.value}"
        return DraftPlacement(options.transport, device, why)
    if options.mps:
        return DraftPlacement(Transport.IPC, device, "with --mps, the draft has its own process")
    if options.draft_device != "auto":
        return DraftPlacement(Transport.IPC, device, f"--draft-device {device}")
    if options.algorithm is Algorithm.NGRAM:
        return DraftPlacement(Transport.INPROC, device, "n-grams need no device")
    if options.tp is not None and options.tp > 1:
        return DraftPlacement(Transport.INPROC, device, "with --tp, the draft runs beside rank 0")
    if not on_gpu:
        return DraftPlacement(Transport.GRPC, device, "on a CPU, two processes use more cores")
    if beside is None:
        return DraftPlacement(Transport.INPROC, device, "no other GPU is idle")
    if options.max_running_requests is None or options.max_running_requests > MOST_MEASURED_REQUESTS:
        return DraftPlacement(
            Transport.INPROC,
            device,
            f"{beside} is idle, but a draft there is not known to be as fast for more than "
            f"{MOST_MEASURED_REQUESTS} request at a time. To use it, pass --transport ipc",
        )
    return DraftPlacement(
        Transport.IPC, beside, f"{beside} is idle and known to be as fast for single requests"
    )


def usable_gpus() -> list[Gpu]:
    """Return the GPUs of this process, in the order of CUDA's numbers. Empty if torch cannot use a GPU.

    This function loads neither torch nor CUDA. Without nvidia-smi, each GPU counts as busy.
    """
    if not torch_has_cuda():
        return []
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return []
    # nvidia-smi may take a second, so several GPUs are queried at the same time.
    with ThreadPoolExecutor(len(devices)) as pool:
        found = list(pool.map(nvidia_smi_memory, range(len(devices))))
    if found[0] is None and not os.environ.get("CUDA_VISIBLE_DEVICES", "0"):
        return []  # an empty list hides all GPUs
    known = [Gpu(index, *memory) for index, memory in enumerate(found) if memory is not None]
    return known or [Gpu(0, 0, IDLE_BYTES + 1)]


def nvidia_smi_memory(index: int) -> tuple[int, int] | None:
    """Return the free and total memory, in bytes, of this process's GPU number `index`.

    The result is None if there is no such GPU. The function runs the program nvidia-smi and does not call
    CUDA. A CUDA call would create a context that uses GPU memory until this process exits.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [name.strip() for name in (named or "").split(",") if name.strip()]
    if named is not None and index >= len(visible):
        return None  # an empty list hides all GPUs
    command = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(
            [*command, f"--id={visible[index] if visible else index}"],
            capture_output=True,
            text=True,
            timeout=QUERY_TIMEOUT_S,
            check=True,
        )
        free, total = (int(part) << 20 for part in asked.stdout.strip().split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return free, total


def torch_has_cuda() -> bool:
    """Return True if the installed torch was built for GPUs. Does not import torch, which takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return True
    versions = re.findall(r"^(?:cuda|hip)\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    return not versions or any(version.strip() != "None" for version in versions)


def _idle_gpu(options: StackOptions, gpus: Sequence[Gpu]) -> str | None:
    """Return the first idle GPU that the target does not use, or None."""
    first = int(options.device.partition(":")[2] or 0)
    own = range(first, first + (options.tp or 1))
    return next((f"cuda:{gpu.index}" for gpu in gpus if gpu.index not in own and gpu.is_idle), None)
