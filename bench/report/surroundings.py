"""Describes the benchmark process for the result file, and runs NVIDIA's multi-process service (MPS) for it.

The description contains the environment variables, the age of the process and the number of compiled kernels.
With MPS, several processes can use a GPU at the same time.
"""

from __future__ import annotations

import os
import sys
import tempfile
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
RECORDED_ELSEWHERE = ("NCCL_VERSION", REVISION)
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = "/tmp/nvidia-mps"


def recorded_environment() -> dict[str, str]:
    """Return the environment variables of this process that affect figures.

    As in `recorded_command`, absolute paths are reduced to their last part.
    """
    matters = {
        name: value
        for name, value in os.environ.items()
        if name in VARIABLES
        or (
            name.startswith(PREFIXES)
            and name not in RECORDED_ELSEWHERE
            and not any(word in name for word in SECRET)
        )
    }
    return {
        name: Path(value).name if value.startswith("/") else value for name, value in sorted(matters.items())
    }


def under_mps() -> bool:
    """Return True if processes share the GPU through MPS, i.e. if the MPS pipe exists where CUDA looks."""
    return (Path(os.environ.get(PIPES, DEFAULT_PIPES)) / "control").exists()


@contextmanager
def multi_process_service(wanted: bool) -> Iterator[Surroundings]:
    """Run NVIDIA's multi-process service (MPS) for this process and its children, if `wanted` is True.

    `outrider up --mps` runs MPS in the same way. Call this function before CUDA is initialised, because a
    process joins MPS when it creates its CUDA context.

    Raises:
        ConfigurationError: MPS is wanted, but this machine does not have it.
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


def compiled_kernels() -> int:
    """Return the number of compiled kernels in Triton's cache on disk."""
    home = Path(os.environ.get("TRITON_HOME", Path.home()))
    return sum(
        1 for _ in Path(os.environ.get("TRITON_CACHE_DIR", home / ".triton" / "cache")).glob("*/*.cubin")
    )
