"""Rounds that are enqueued before what they need has come over the network: the stream awaits a word, and this process's host writes it.

To the stream it is a mailbox as between two processes of one host (see `shared.rpc.ipc.round_words`); the peer behind it is the host, which
carries blobs to and from messages. So when a message arrives nothing is left to be launched: its bytes are copied to pinned memory, a word
is written, and the copies and the graph behind it run. Between the enqueuing of a wait and its end the host must ask nothing of the device
that is answered behind the wait, as a synchronisation, an allocation and the first launch of a kernel may be; where it does, the watch ends
the wait at its limit. A kernel that has run before is launched on another stream without any such answer, see `call`.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.envelopes import Blob
from outrider.shared.rpc.ipc.blob_mailbox import SLOTS, BlobLayout
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.ipc.cuda_blob_mailbox import StreamMailbox
from outrider.shared.rpc.ipc.doorbells import Doorbells, Side
from outrider.shared.rpc.ipc.slots import SharedMemory

STATE_BYTES = 512 * 1024
"""Ten sequences of 6 rows of 4096 in bf16. A state holds all rows, accepted or not: of larger batches less travels by way of the host."""
NUMBER = struct.Struct("<i")
LEAST_STATE_BYTES = 256
"""Its header. What a state lacks behind that holds nothing that counts."""
TREES_BYTES = 64 * 1024
"""Of as many sequences, trees of 800 nodes each."""
LAYOUT = BlobLayout(STATE_BYTES, TREES_BYTES, inside=False)

log = get_logger("outrider.rpc")


class PinnedSlots:
    """Slots in memory of this process that copies of streams reach without a detour."""

    def __init__(self, num_bytes: int) -> None:
        with torch.inference_mode(False):
            self._tensor = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.array: NDArray[np.uint8] = self._tensor.numpy()
        self.bytes = self.array.data
        self.pointer = self._tensor.data_ptr()


class StreamRelay:
    """One end of the rounds of a connection, for a process with a GPU.

    `give` and `take` enqueue on torch's current stream, on the thread that launches rounds; `settle` and `put` are for the thread that
    carries, `release` and `close` for any.

    Args:
        side: Of this process.
        device: Where its blobs are.

    Raises:
        CudaError: Streams cannot await words in host memory here.
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
                event.record()  # makes it
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with (
                torch.inference_mode(False),
                torch.cuda.stream(self._aside),
            ):  # whoever has this memory next is behind the last call
                self._trifle = torch.zeros(1, dtype=torch.int32, device=device)
            self.call()
            self._aside.synchronize()  # its kernel is loaded before anything waits

    @staticmethod
    def try_make(side: Side, device: torch.device) -> StreamRelay | None:
        """Return one, or None where there can be none."""
        if device.type != "cuda":
            return None
        try:
            return StreamRelay(side, device)
        except CudaError as error:
            log.warning("rounds are launched when their messages arrive", reason=error.message)
            return None

    @property
    def broken(self) -> bool:
        """See `BlobMailbox.broken`."""
        return self._mailbox.broken

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """Whether blobs of these sizes can travel."""
        return state.nbytes <= LAYOUT.state_bytes and trees.nbytes <= LAYOUT.trees_bytes

    def give(self, number: int, blob: torch.Tensor) -> None:
        """Enqueue that this side's blob of a round goes to the host, see `BlobMailbox.send`."""
        self._mailbox.send(number, blob, self._given[number % SLOTS])

    def take(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """Enqueue that the peer's blob of a round comes, see `BlobMailbox.receive`."""
        self._sizes[number % SLOTS] = number, blob.nbytes
        self._mailbox.receive(number, blob, expected, limit_s)

    def call(self) -> None:
        """Have the GPU turn to this process as soon as nothing else runs, by work that need not wait.

        Processes that share a GPU without MPS have it by turns. For a stream whose wait has just ended it takes 160 µs to turn (H200);
        meanwhile the word that ends the wait is on its way between the processes.
        """
        with torch.cuda.stream(self._aside):
            self._trifle.zero_()

    def given(self, number: int) -> bool:
        """Whether the device has given its blob of a round."""
        return bool(self._given[number % SLOTS].query())  # type: ignore[no-untyped-call]

    def settle(self, number: int, num_bytes: int) -> NDArray[np.uint8]:
        """Wait until the device has given its blob of a round, and return it; it holds until the round after the next is enqueued."""
        self._given[number % SLOTS].synchronize()  # polls, without the interpreter
        start = self._out(number)
        return self._slots.array[start : start + num_bytes]

    def put(self, number: int, data: Blob) -> None:
        """Hand the peer's blob of a round that was enqueued to the stream. A state may lack its end.

        Raises:
            ProtocolError: Its size is another; the wait goes on.
        """
        enqueued, num_bytes = self._sizes[number % SLOTS]
        size = len(data)
        if enqueued != number or not (self._least or num_bytes) <= size <= num_bytes:
            raise ProtocolError(f"A blob of {size} bytes where {num_bytes} are due.", field="rounds")
        start = self._in(number)
        self._slots.bytes[start : start + size] = data
        NUMBER.pack_into(self._slots.bytes, start, number)
        self._peer.give(number)

    def release(self, number: int) -> None:
        """End the wait for a round for which nothing comes: what lies there is of an earlier one, as its header says."""
        self._peer.give(number)

    def mend(self) -> bool:
        """See `BlobMailbox.mend`."""
        return self._mailbox.mend()

    def close(self) -> None:
        """End every wait, now and from now on."""
        self._mailbox.close()
