"""Exchanges blobs (states and trees of rounds) between the GPU streams of two processes.

Each stream writes words and waits for words (`doorbells`) in host memory that both processes have registered
with CUDA. Normally, the CPUs take no part. If a peer is dead, stopped or late, the `DoorbellWatchdog` of the
waiting process writes the peer's word. The waiting stream then continues.

The blobs lie on the target's GPU. The draft maps their memory, and runs on the same GPU or on another GPU of
the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from outrider.kernels.round_trade import WORD_BYTES, fetch_blob, post_blob
from outrider.shared.rpc.ipc.blob_mailbox import BlobLayout
from outrider.shared.rpc.ipc.cuda import CudaError, PeerMemory, copy_async, runtime_call
from outrider.shared.rpc.ipc.deferred_release import DEFERRED_RELEASE
from outrider.shared.rpc.ipc.doorbells import Doorbells, DoorbellWatchdog, Side
from outrider.shared.rpc.ipc.slots import PAGE_BYTES, SharedMemory

REGISTER_PORTABLE_AND_MAPPED = 3
WAIT_UNTIL_AT_LEAST = 0
RELEASED = 0x7FFFFFFF
TRIED_BYTES = 1024


class SlotMemory(Protocol):
    """The memory that contains the slots. `pointer` is the address that streams use for copies."""

    pointer: int


class StreamMailbox:
    """A `BlobMailbox` for a process with a GPU. Its work is enqueued on torch's current stream of the device.

    When the last reference to the mailbox is gone, all waits end immediately. The memory is freed once the
    streams that used the mailbox have passed their waits.

    Args:
        layout: Sizes of the slots.
        memory: Shared memory that contains the words (`shared.rpc.ipc.doorbells`).
        slots: GPU memory of ``layout.slots_bytes`` bytes for the slots. If it is the peer's memory, it is
            unmapped when the mailbox is released or its creation fails.
        side: The side of this process: target or draft.
        device: The device of this process's blobs.

    Raises:
        CudaError: This driver's streams cannot wait for words in host memory.
    """

    def __init__(
        self, layout: BlobLayout, memory: SharedMemory, slots: SlotMemory, side: Side, device: torch.device
    ) -> None:
        self.layout = layout
        self._words = Doorbells(memory, side)
        self._watch = DoorbellWatchdog(self._words)
        DEFERRED_RELEASE.spare(self._watch)
        self._slots = slots
        self._device = device
        # The streams on which the mailbox was used, by handle.
        self._streams: dict[int, torch.cuda.Stream] = {}
        try:
            self._base = _register(memory, device)
        except CudaError:
            _unmap(slots)
            raise
        DEFERRED_RELEASE.when_gone(
            self, functools.partial(_let_go, self._words, slots, device, self._streams)
        )
        weakref.finalize(self, self._words.release, RELEASED).atexit = False
        out, back = (
            (layout.state_slot, layout.trees_slot)
            if side is Side.TARGET
            else (layout.trees_slot, layout.state_slot)
        )
        self._out, self._in = out, back
        self._try()

    @property
    def broken(self) -> bool:
        """True if the watchdog has ended a wait since the last successful `mend`."""
        return self._watch.broken

    def send(self, number: int, blob: torch.Tensor, put: torch.cuda.Event | None = None) -> None:
        """Enqueue the blob's copy to its slot, then the announcement of the blob.

        After the copy, the CUDA event `put` is recorded, if it is given.
        """
        slot = self._slots.pointer + self._out(number)
        with self._current() as stream:
            if self._by_kernel(blob):
                post_blob(blob, slot, number)
            else:
                _write_value(stream, blob.data_ptr(), number)
                copy_async(slot, blob.data_ptr(), blob.nbytes, self._device)
            if put is not None:
                put.record()
            _write_value(stream, self._base + self._words.given_at, number)

    def receive(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """Enqueue the wait for the peer's blob, and the copy from the slot (see `BlobMailbox.receive`).

        If `broken` is True, neither the wait nor the copy is enqueued.
        """
        slot, passed = self._slots.pointer + self._in(number), self._base + self._words.passed_at
        with self._current() as stream:
            _write_value(stream, expected.data_ptr(), number)
            if self.broken:
                return
            self._watch.expect(number, limit_s)
            _wait_value(stream, self._base + self._words.awaited_at, number)
            if self._by_kernel(blob):
                fetch_blob(slot, blob, passed, number)
            else:
                _write_value(stream, passed, number)
                copy_async(blob.data_ptr(), slot, blob.nbytes, self._device)

    def skip(self, number: int) -> None:
        """Enqueue the announcement of a round without a blob."""
        with self._current() as stream:
            _write_value(stream, self._base + self._words.given_at, number)

    def mend(self) -> bool:
        """Reset `broken` once all waits are over. Return False while a wait is still running."""
        return self._watch.mend()

    def close(self) -> None:
        """End all waits, current and future."""
        self._watch.close()

    def _try(self) -> None:
        """Write a word and wait for it on the stream. Raises the error if the driver lacks stream waits.

        Also compiles the kernels, so that no peer has to wait for the compilation later. The slots of round 0
        are still empty, so the test copies overwrite no data.
        """
        slot, passed = self._slots.pointer + self._in(0), self._base + self._words.passed_at
        with self._current() as stream:
            _write_value(stream, passed, 0)
            _wait_value(stream, passed, 0)
            blob = torch.zeros(TRIED_BYTES, dtype=torch.uint8, device=self._device)
            fetch_blob(slot, blob, passed, 0)
            post_blob(torch.zeros_like(blob), self._slots.pointer + self._out(0), 0)
            torch.cuda.current_stream(self._device).synchronize()

    def _by_kernel(self, blob: torch.Tensor) -> bool:
        """Return whether a kernel copies the blob, which requires that the blob's size is a whole number of
        words.
        """
        return blob.nbytes % WORD_BYTES == 0

    @contextlib.contextmanager
    def _current(self) -> Iterator[int]:
        """Make the device current, because stream 0 is the current device's. Yield its current stream."""
        with torch.cuda.device(self._device):
            _bind_context(torch.cuda.current_device())
            stream = torch.cuda.current_stream(self._device)
            number = stream.cuda_stream
            self._streams.setdefault(number, stream)
            yield number


def _write_value(stream: int, address: int, value: int) -> None:
    """Enqueue a write of 4 bytes after all earlier work, and make that work visible to every process."""
    _driver_call(
        "cuStreamWriteValue32_v2",
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        ctypes.c_uint(0),
    )


def _wait_value(stream: int, address: int, value: int) -> None:
    """Make the stream wait until the 4 bytes are at least `value`."""
    flags = ctypes.c_uint(WAIT_UNTIL_AT_LEAST)
    _driver_call(
        "cuStreamWaitValue32_v2",
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        flags,
    )


def _bind_context(device: int) -> None:
    """Bind this thread to the context of a device.

    The CUDA runtime binds the context on its first call. The driver does not.
    """
    context = ctypes.c_void_p()
    _driver_call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        _driver_call("cuCtxSetCurrent", ctypes.c_void_p(_primary_context(device)))


@functools.cache
def _primary_context(device: int) -> int:
    """Return the context that the CUDA runtime uses on a device, and retain it permanently, as torch does."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _driver_call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _driver_call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return int(context.value or 0)


def _driver_call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CudaError(f"{name}: CUDA driver error {status}")


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(str(error)) from None


def _address(memory: SharedMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory.bytes))


def _register(memory: SharedMemory, device: torch.device) -> int:
    """Register the words for streams of `device`. Return the device address of the first word."""
    here, there = ctypes.c_void_p(_address(memory)), ctypes.c_void_p()
    with torch.cuda.device(device):
        runtime_call(
            "cudaHostRegister", here, ctypes.c_size_t(PAGE_BYTES), ctypes.c_uint(REGISTER_PORTABLE_AND_MAPPED)
        )
        runtime_call("cudaHostGetDevicePointer", ctypes.byref(there), here, ctypes.c_uint(0))
    return int(there.value or 0)


def _let_go(
    words: Doorbells, slots: SlotMemory, device: torch.device, streams: dict[int, torch.cuda.Stream]
) -> None:
    """Undo `_register` and unmap the slots, after each of `streams` has finished using words and slots.

    Waits for these streams only. A device-wide wait would break a graph capture that is running on the
    device.
    """
    with torch.cuda.device(device):
        for stream in streams.values():
            passed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            passed.record(stream)
            passed.synchronize()
        runtime_call("cudaHostUnregister", ctypes.c_void_p(_address(words.memory)))
    _unmap(slots)


def _unmap(slots: SlotMemory) -> None:
    if isinstance(slots, PeerMemory):
        slots.close()
