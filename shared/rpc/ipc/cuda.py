"""The few calls of the CUDA runtime that share device memory between processes, by ctypes on the library that torch has loaded.

torch shares tensors by pickling a handle per message; here one handle of 64 bytes is exchanged once. Memory for it is taken by cudaMalloc,
not from torch's caching allocator, whose blocks start inside larger ones and may come from a pool that cannot be shared.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from outrider.shared.base.errors import UnavailableError
from outrider.shared.rpc.ipc.deferred_release import DISPOSAL

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
MEMCPY_DEFAULT = 4
LATE_WRITES_S = 3.0
"""So long may a process that has mapped memory still read and write there after it was hung up on: longer than its streams wait."""


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t; passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaError(UnavailableError):
    """A call of the CUDA runtime failed; the other ways of sending tensors remain."""

    reason = "cuda_ipc"


class DeviceMemory:
    """Device memory of this process that others may map, zeroed. Given back when nobody refers to it: who still writes must not lose it."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            runtime_call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            runtime_call("cudaMemset", pointer, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
        self.pointer = int(pointer.value or 0)
        self._device = device
        DISPOSAL.when_gone(self, functools.partial(_free, self.pointer, device), LATE_WRITES_S)

    def handle(self) -> bytes:
        """Return what another process of this host needs to map it."""
        handle = IpcHandle()
        with torch.cuda.device(self._device):
            runtime_call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self.pointer))
        return bytes(memoryview(handle))


class PeerMemory:
    """Device memory of another process, mapped for kernels and copies of `device`, which may be another GPU of the host.

    Raises:
        CudaError: the GPUs do not reach each other, or the handle is of this very process.
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            runtime_call(
                "cudaIpcOpenMemHandle",
                ctypes.byref(pointer),
                IpcHandle.from_buffer_copy(handle),
                ctypes.c_uint(LAZY_PEER_ACCESS),
            )
        self.pointer = int(pointer.value or 0)
        self._device = device

    def close(self) -> None:
        """Unmap it; safe to call more than once."""
        if self.pointer:
            with torch.cuda.device(self._device):
                runtime_call("cudaIpcCloseMemHandle", ctypes.c_void_p(self.pointer))
            self.pointer = 0


def _free(pointer: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        runtime_call("cudaFree", ctypes.c_void_p(pointer))


def copy_async(destination: int, source: int, num_bytes: int, device: torch.device) -> None:
    """Copy between any two addresses that `device` reaches, on torch's current stream of `device`."""
    with torch.cuda.device(device):  # stream 0 is that of the current device
        runtime_call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(destination),
            ctypes.c_void_p(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_int(MEMCPY_DEFAULT),
            ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
        )


def runtime_call(name: str, *arguments: Any) -> None:
    runtime = _runtime()
    status = getattr(runtime, name)(*arguments)
    if status:
        runtime.cudaGetLastError()  # or the next launch of torch would report it
        raise CudaError(f"{name}: {runtime.cudaGetErrorString(status).decode()}")


@functools.cache
def _runtime() -> Any:
    """Return the runtime that torch uses: another copy of the library would have streams and devices of its own."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    loaded = {
        line.split(maxsplit=5)[-1].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libcudart" in line
    }
    if not loaded:
        raise CudaError("torch has loaded no libcudart here")
    runtime = ctypes.CDLL(sorted(loaded)[0])
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
