"""Begins slow work of a target or draft before the process imports torch: reading weights, opening the GPU.

Importing torch takes seconds, and mostly keeps one core busy. On other threads, the operating system can
meanwhile read the weight files into its page cache, and the driver can create the CUDA context that torch
uses later. This only saves time. If the work fails or is not done in time, the service does it again and
reports the errors.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from outrider.services.stack.options import INPROC
from outrider.services.stack.placement import torch_has_cuda

MODEL_FLAGS = ("--model", "--model-path", "--draft", "--target-weights")
MOST_BYTES = 16 << 30
"""Largest number of bytes to read ahead."""
MEMORY_SHARE = 4
"""The weights that are read ahead fill at most the available memory divided by this number."""
PIECE_BYTES = 32 << 20
DRIVER = "libcuda.so.1"


def begin(arguments: Sequence[str]) -> list[threading.Thread]:
    """Start to read the model folders and to create the CUDA context that the arguments of a service name.

    Nothing is checked here. The service reports wrong arguments itself.

    Args:
        arguments: Arguments of `outrider serve target` or `outrider serve draft`.

    Returns:
        The threads that do the work. They do not keep the process alive.
    """
    works: list[Callable[[], object]] = []
    folders = [Path(name.removeprefix(INPROC)) for name in values_of(arguments, *MODEL_FLAGS)]
    files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
    if files:
        works.append(lambda: read_files(files, limit_bytes()))
    device = cuda_device(arguments)
    if device is not None:
        works.append(lambda: open_gpu(device))
    threads = [threading.Thread(target=_quietly, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads


def values_of(arguments: Sequence[str], *flags: str) -> list[str]:
    """Return the values of flags, in the order of the arguments.

    Example:
        >>> values_of(["--model", "/m", "--tp", "2", "--draft=/d"], "--model", "--draft")
        ['/m', '/d']
    """
    found = []
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in flags and (equals or index + 1 < len(arguments)):
            found.append(value if equals else arguments[index + 1])
    return found


def cuda_device(arguments: Sequence[str]) -> int | None:
    """Return the number of the GPU that this process will use, or None if there is none or it is not known.

    Without the flag `--device`, the device may come from the environment or a file. A rank that `torchrun`
    starts has a GPU of its own.
    """
    kind, _, index = (values_of(arguments, "--device") or [""])[-1].partition(":")
    if kind not in ("auto", "cuda") or "WORLD_SIZE" in os.environ or not torch_has_cuda():
        return None
    return int(index) if index.isdecimal() else 0


def read_files(files: Iterable[Path], limit: int) -> int:
    """Ask the operating system to read files into its page cache, from their beginnings.

    The calls return before the data has arrived.

    Args:
        files: The files, in the order in which they will be used.
        limit: Largest number of bytes to read.

    Returns:
        The number of bytes asked for.
    """
    asked = 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            size = min(os.fstat(opened.fileno()).st_size, limit - asked)
            for start in range(0, size, PIECE_BYTES):
                piece = min(PIECE_BYTES, size - start)
                os.posix_fadvise(opened.fileno(), start, piece, os.POSIX_FADV_WILLNEED)
                asked += piece
    return asked


def limit_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return how many bytes may be read ahead, without displacing much else from the page cache."""
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return min(MOST_BYTES, int(line.split()[1]) * 1024 // MEMORY_SHARE)
    return 0


def open_gpu(device: int, driver: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> None:
    """Create the primary CUDA context of a GPU, which torch then finds and uses.

    Args:
        device: Number of the GPU among those that this process may use.
        driver: Loads the library of NVIDIA's driver.

    Raises:
        OSError: There is no such driver.
    """
    cuda = driver(DRIVER)
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(handle), device) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)


def _quietly(work: Callable[[], object]) -> None:
    with suppress(OSError, ValueError):
        work()
