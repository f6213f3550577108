"""What a benchmark's process was started with, and in what it runs: its environment, its age, the multi-process service of the GPU."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.bench.report.source import REVISION
from outrider.services.stack.mps import shared_gpu
from outrider.services.stack.supervisor import Surroundings

VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)
PREFIXES = ("NCCL_", "OUTRIDER_")
TOLD_ELSEWHERE = ("NCCL_VERSION", REVISION)
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"
START_FIELD = 19
"""Of /proc/self/stat behind the name in parentheses: when the process started, in ticks since the machine did."""


def recorded_environment() -> dict[str, str]:
    """Return the variables of this process that bear on figures; of absolute paths only the names, as in `recorded_command`."""
    matters = {
        name: value
        for name, value in os.environ.items()
        if name in VARIABLES
        or (
            name.startswith(PREFIXES)
            and name not in TOLD_ELSEWHERE
            and not any(word in name for word in SECRET)
        )
    }
    return {
        name: Path(value).name if value.startswith("/") else value for name, value in sorted(matters.items())
    }


def under_mps() -> bool:
    """Whether processes share the GPU through the multi-process service: its daemon's pipes are where CUDA looks for them."""
    return (Path(os.environ.get(PIPES, DEFAULT_PIPES)) / "control").exists()


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[Surroundings]:
    """Run the service for this process and its children, as `outrider up --mps` does; CUDA must not have been asked for before.

    Raises:
        ConfigurationError: It is wanted, and there is none here.
    """
    if not wanted:
        yield Surroundings()
        return
    with (
        tempfile.TemporaryDirectory(prefix="outrider-mps-") as folder,
        shared_gpu(Path(folder), lambda name, line: print(f"{name} | {line}", file=sys.stderr)) as around,
    ):
        before = {name: os.environ.get(name) for name in around.variables}
        os.environ.update(around.variables)
        try:
            yield around
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def process_age_s() -> float:
    """Return the seconds since this process was started, imports included."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[START_FIELD]) / os.sysconf("SC_CLK_TCK")


def compiled_kernels() -> int:
    """Return how many kernels lie compiled in Triton's cache on the disk."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return sum(
        1 for _ in Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")).glob("*/*.cubin")
    )
