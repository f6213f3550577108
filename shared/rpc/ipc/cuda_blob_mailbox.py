"""Rounds exchanged without the host: the streams of two processes write and await words in host memory that both have registered.

The words lie in host memory so that either host can write them too: a stream that waits for a process which has died, stopped or fallen
behind goes on when `DoorbellWatchdog` says so. Blobs lie on the target's GPU, which the draft has mapped, on the same GPU or another of the host.
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
from outrider.shared.rpc.ipc.deferred_release import DISPOSAL
from outrider.shared.rpc.ipc.doorbells import Doorbells, DoorbellWatchdog, Side
from outrider.shared.rpc.ipc.slots import PAGE_BYTES, SharedMemory

REGISTER_PORTABLE_AND_MAPPED = 3
WAIT_UNTIL_AT_LEAST = 0
RELEASED = 0x7FFFFFFF
TRIED_BYTES = 1024


class SlotMemory(Protocol):
    """Where the slots lie, for copies of streams: `pointer` is their address."""

    pointer: int


class StreamMailbox:
    """`BlobMailbox` of a process with a GPU. Work goes to torch's current stream of the device.

    When nobody refers to it any more, all waits end at once; what its streams use is given back when they have passed.

    Args:
        layout: Sizes of the slots.
        memory: The words.
        slots: Of ``layout.slots_bytes``; those of a peer are unmapped with the mailbox, or if there can be none.
        side: Of this process.
        device: Where its blobs are.

    Raises:
        CudaError: streams cannot await words in host memory here.
    """

    def __init__(
        self, layout: BlobLayout, memory: SharedMemory, slots: SlotMemory, side: Side, device: torch.device
    ) -> None:
        self.layout = layout
        self._words = Doorbells(memory, side)
        self._watch = DoorbellWatchdog(self._words)
        DISPOSAL.spare(self._watch)
        self._slots = slots
        self._device = device
        # Those that it was used on, by their numbers.
        self._streams: dict[int, torch.cuda.Stream] = {}
        try:
            self._base = _register(memory, device)
        except CudaError:
            _unmap(slots)
            raise
        DISPOSAL.when_gone(self, functools.partial(_let_go, self._words, slots, device, self._streams))
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
        """See `BlobMailbox.broken`."""
        return self._watch.broken

    def send(self, number: int, blob: torch.Tensor, put: torch.cuda.Event | None = None) -> None:
        """See `BlobMailbox.send`; `put` is recorded as soon as the blob lies in its slot."""
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
        """See `BlobMailbox.receive`."""
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
        """See `BlobMailbox.skip`."""
        with self._current() as stream:
            _write_value(stream, self._base + self._words.given_at, number)

    def mend(self) -> bool:
        """See `BlobMailbox.mend`."""
        return self._watch.mend()

    def close(self) -> None:
        """See `BlobMailbox.close`."""
        self._watch.close()

    def _try(self) -> None:
        """Have the stream write a word of this side's and await it, so that a driver which cannot is found out now.

        Kernels are compiled here, not while a peer waits; nothing lies in the slots that round 0 copies from.
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
        """Whether a blob is copied by a kernel: in whole words."""
        return blob.nbytes % WORD_BYTES == 0

    @contextlib.contextmanager
    def _current(self) -> Iterator[int]:
        """Yield the device's current stream, with the device current: the driver takes stream 0 for that of the current device."""
        with torch.cuda.device(self._device):
            _bind_context(torch.cuda.current_device())
            stream = torch.cuda.current_stream(self._device)
            number = stream.cuda_stream
            self._streams.setdefault(number, stream)
            yield number


def _write_value(stream: int, address: int, value: int) -> None:
    """Write 4 bytes when all work before is done and can be seen by everyone."""
    _driver_call(
        "cuStreamWriteValue32_v2",
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        ctypes.c_uint(0),
    )


def _wait_value(stream: int, address: int, value: int) -> None:
    """Hold the stream until 4 bytes are at least `value`."""
    flags = ctypes.c_uint(WAIT_UNTIL_AT_LEAST)
    _driver_call(
        "cuStreamWaitValue32_v2",
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        flags,
    )


def _bind_context(device: int) -> None:
    """Give this thread the context of its device, as the runtime does when a thread first asks it for something; the driver does not."""
    context = ctypes.c_void_p()
    _driver_call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        _driver_call("cuCtxSetCurrent", ctypes.c_void_p(_primary_context(device)))


@functools.cache
def _primary_context(device: int) -> int:
    """Return the context that the runtime uses on a device; kept for good, as torch keeps it."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _driver_call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _driver_call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return int(context.value or 0)


def _driver_call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CudaError(f"{name}: error {status} of the CUDA driver")


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(str(error)) from None


def _address(memory: SharedMemory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory.bytes))


def _register(memory: SharedMemory, device: torch.device) -> int:
    """Let streams of `device` write and await the words; returns the address of the first as they know it."""
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
    """Undo `_register`, and unmap the slots, when none of `streams` needs them any more. Not the device is waited for: a graph may be
    recorded on it, which that would break."""
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
