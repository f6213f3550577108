"""Enqueues rounds on a GPU before their data arrives over gRPC. The GPU's stream waits for the data.

The CUDA stream waits until the host writes a word, which is a number in host memory. The stream uses the same
mailbox and words as two processes on one host (`shared.rpc.ipc.doorbells`). Here, however, the other side of
the mailbox is this process's own CPU. The CPU copies blobs (states or trees of rounds) between messages and
the mailbox:

    peer's message arrives  →  host copies it to pinned memory  →  host writes the word  →  stream continues

When a message arrives, the copies and the graph after the wait are already enqueued, so they run immediately.

While a wait is enqueued or running, the host must not wait for the device. Synchronisations, allocations and
first launches of kernels can wait for the device. The stream's wait would then last until the watchdog ends
it. A kernel that has run before can be launched safely on another stream (see `StreamRelay.call`).
"""

from __future__ import annotations

import os
import struct

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.shared.base.errors import wrong_size
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.envelopes import Blob, Expand
from outrider.shared.rpc.ipc.blob_mailbox import SLOTS, BlobLayout
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.ipc.cuda_blob_mailbox import StreamMailbox
from outrider.shared.rpc.ipc.doorbells import Doorbells, Side
from outrider.shared.rpc.ipc.slots import SharedMemory

STATE_BYTES = 4 * 1024 * 1024
"""Largest state in bytes. It has room for 64 sequences with 6 bf16 rows of width 4096 each.

The memory has room for the feature rows of rejected tokens, but these rows are not sent. Larger batches use
rounds through the host.
"""
NUMBER = struct.Struct("<i")
LEAST_STATE_BYTES = 256
"""Size of a state's header, which is the smallest size of a received state.

A received state may lack unused rows at its end.
"""
TREES_BYTES = 128 * 1024
"""Largest trees in bytes. They have room for 64 sequences with 128 nodes each."""
LAYOUT = BlobLayout(STATE_BYTES, TREES_BYTES, inside=False)

log = get_logger("outrider.rpc")


class PinnedSlots:
    """Mailbox slots in pinned memory of this process, for direct copies by streams."""

    def __init__(self, num_bytes: int) -> None:
        with torch.inference_mode(False):
            self._tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.array: NDArray[np.uint8] = self._tensor.numpy()
        self.bytes = self.array.data
        self.pointer = self._tensor.data_ptr()


class StreamRelay:
    """One side of the exchange of states and trees over gRPC, in a process with a GPU.

    Threads:

    - `give` and `take` enqueue on torch's current stream. Call them on the thread that launches rounds.
    - Call `settle` and `put` on the thread that sends and receives messages.
    - `release` and `close` may be called from any thread.

    Args:
        side: The side of this process.
        device: The device of this process's blobs.

    Raises:
        CudaError: This driver's streams cannot wait for words in host memory.
    """

    def __init__(self, side: Side, device: torch.device) -> None:
        memory, file = SharedMemory.create(LAYOUT.memory)
        os.close(file)
        self._device = device
        self._slots = PinnedSlots(LAYOUT.slots_bytes)
        self._mailbox = StreamMailbox(LAYOUT, memory, self._slots, side, device)
        self._peer = Doorbells(memory, Side.DRAFT if side is Side.TARGET else Side.TARGET)
        target = side is Side.TARGET
        self._out, self._in = (
            (LAYOUT.state_slot, LAYOUT.trees_slot) if target else (LAYOUT.trees_slot, LAYOUT.state_slot)
        )
        self._least = None if target else LEAST_STATE_BYTES
        self._sizes = [(0, 0)] * SLOTS
        with torch.cuda.device(device):
            self._given = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
            for event in self._given:
                event.record()  # torch creates the event on its first record
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # Allocate on this stream, so that the memory's next owner runs after the last `call`.
            with torch.inference_mode(False), torch.cuda.stream(self._aside):
                self._trifle = torch.zeros(1, dtype=torch.int32, device=device)
            self.call()
            # Load the kernel now, because its first launch must not happen behind a wait.
            self._aside.synchronize()

    @staticmethod
    def try_make(side: Side, device: torch.device) -> StreamRelay | None:
        """Return a relay, or None if this device or its driver cannot support one."""
        if device.type != "cuda":
            return None
        try:
            return StreamRelay(side, device)
        except CudaError as error:
            log.warning("rounds are launched when their messages arrive", reason=error.message)
            return None

    @property
    def broken(self) -> bool:
        """True if a wait has ended without its blob since the last successful `mend`."""
        return self._mailbox.broken

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """Return whether blobs of these sizes fit into the slots."""
        return state.nbytes <= LAYOUT.state_bytes and trees.nbytes <= LAYOUT.trees_bytes

    def give(self, number: int, blob: torch.Tensor) -> None:
        """Enqueue the copy of this side's blob of a round to the host; see `BlobMailbox.send`."""
        self._mailbox.send(number, blob, self._given[number % SLOTS])

    def take(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """Enqueue the wait for the peer's blob of a round, and the copy; see `BlobMailbox.receive`."""
        self._sizes[number % SLOTS] = number, blob.nbytes
        self._mailbox.receive(number, blob, expected, limit_s)

    def call(self) -> None:
        """Make the GPU switch to this process as soon as no other process uses the GPU.

        This method launches a trivial kernel that waits for nothing.

        Processes that share a GPU without MPS are time-sliced, and a switch takes 160 µs (H200). Call this
        method early: the GPU then switches while the awaited data is still on its way.
        """
        with torch.cuda.stream(self._aside):
            self._trifle.zero_()

    def given(self, number: int) -> bool:
        """Return whether the device has copied this side's blob of a round to the host."""
        return bool(self._given[number % SLOTS].query())  # type: ignore[no-untyped-call]

    def settle(self, number: int, num_bytes: int) -> NDArray[np.uint8]:
        """Wait until the device has copied this side's blob of a round to the host, and return the blob.

        The blob of round n is valid until round n + 2 is enqueued.
        """
        self._given[number % SLOTS].synchronize()  # polls without holding the GIL
        start = self._out(number)
        return self._slots.array[start : start + num_bytes]

    def put(self, number: int, data: Blob, expand: Expand | None = None) -> None:
        """Pass the peer's blob of an enqueued round to the waiting stream.

        Args:
            number: The number of the round.
            data: The bytes of the blob. A state may lack unused rows at its end.
            expand: Writes `data` to its places in the slot. If None, `data` is copied to the slot's start.

        Raises:
            ProtocolError: The blob has a wrong size. The stream continues to wait.
        """
        enqueued, num_bytes = self._sizes[number % SLOTS]
        size = len(data)
        if enqueued != number or not (self._least or num_bytes) <= size <= num_bytes:
            raise wrong_size(size, num_bytes)
        start = self._in(number)
        if expand is not None:
            expand(data, self._slots.bytes[start : start + num_bytes])
        else:
            self._slots.bytes[start : start + size] = data
        NUMBER.pack_into(self._slots.bytes, start, number)
        self._peer.give(number)

    def release(self, number: int) -> None:
        """End the stream's wait for a round, although the peer's blob has not arrived.

        The header in the mailbox's slot still contains the number of an earlier round. From this number, the
        reader of the slot detects that the blob is missing.
        """
        self._peer.give(number)

    def mend(self) -> bool:
        """Reset `broken` once all waits are over. Return False while a wait is still running."""
        return self._mailbox.mend()

    def close(self) -> None:
        """End all waits, current and future."""
        self._mailbox.close()
