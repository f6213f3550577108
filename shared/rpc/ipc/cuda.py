"""Shares GPU memory between processes, with a few ctypes calls to the CUDA runtime that torch has loaded.

To share tensors, torch itself pickles a handle for each message. Here, one handle of 64 bytes is exchanged
once. The memory comes from cudaMalloc, because blocks of torch's caching allocator may belong to a memory
pool that cannot be shared.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from outrider.shared.base.errors import UnavailableError
from outrider.shared.rpc.ipc.deferred_release import DEFERRED_RELEASE

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
MEMCPY_DEFAULT = 4
LATE_WRITES_S = 3.0
"""Shortest time for which device memory is kept after its connection was closed.

A process that has mapped the memory may still write to it. `LATE_WRITES_S` is longer than any wait of that
process's streams.
"""


class IpcHandle(ctypes.Structure):
    """cudaIpcMemHandle_t, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaError(UnavailableError):
    """A call of the CUDA runtime or driver failed. The connection can still send tensors without CUDA IPC."""

    reason = "cuda_ipc"


class DeviceMemory:
    """GPU memory of this process that other processes can map. It is filled with zeros at first.

    The memory is freed at least `LATE_WRITES_S` seconds after its last reference is gone. Until then, a peer
    may still write to it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            runtime_call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
            runtime_call("cudaMemset", pointer, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
        self.pointer = int(pointer.value or 0)
        self._device = device
        DEFERRED_RELEASE.when_gone(self, functools.partial(_free, self.pointer, device), LATE_WRITES_S)

    def handle(self) -> bytes:
        """Return the handle with which another process of this host maps the memory."""
        handle = IpcHandle()
        with torch.cuda.device(self._device):
            runtime_call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self.pointer))
        return bytes(memoryview(handle))


class PeerMemory:
    """Memory of another process's GPU, mapped so that kernels and copies on `device` can use it.

    The memory's GPU may be `device` or another GPU of the host.

    Raises:
        CudaError: The GPUs cannot access each other's memory, or the handle comes from this process itself.
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
        """Unmap the memory. May be called more than once."""
        if self.pointer:
            with torch.cuda.device(self._device):
                runtime_call("cudaIpcCloseMemHandle", ctypes.c_void_p(self.pointer))
            self.pointer = 0


def _free(pointer: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        runtime_call("cudaFree", ctypes.c_void_p(pointer))


def copy_async(destination: int, source: int, num_bytes: int, device: torch.device) -> None:
    """Copy between any two addresses that `device` can access, on torch's current stream of `device`."""
    with torch.cuda.device(device):  # stream 0 means the default stream of the current device
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
        runtime.cudaGetLastError()  # clears the error, because otherwise torch's next launch would report it
        raise CudaError(f"{name}: {runtime.cudaGetErrorString(status).decode()}")


@functools.cache
def _runtime() -> Any:
    """Return the CUDA runtime library that torch uses.

    A second copy of the library would have its own streams and devices.
    """
    torch.cuda.init()  # type: ignore[no-untyped-call]
    loaded = {
        line.split(maxsplit=5)[-1].strip()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libcudart" in line
    }
    if not loaded:
        raise CudaError("torch has not loaded libcudart in this process")
    runtime = ctypes.CDLL(sorted(loaded)[0])
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
