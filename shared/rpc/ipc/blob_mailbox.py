"""Where the blobs of rounds lie that two processes exchange: two slots a direction, taken in turn, and the words that say what is there.

Two slots: a side that was released gives no more than one round, which the other may not have read yet, so a state is never overwritten
before it is read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.doorbells import Doorbells, Side
from outrider.shared.rpc.ipc.slots import MAX_SLOT_BYTES, SharedMemory, SlotLayout

SLOTS = 2
STATE_BYTES = 8 * 1024 * 1024
"""64 sequences with 6 rows of 4096 in bf16 take 3 MiB, 64 with 16 rows 8; larger batches go the host's way."""
TREES_BYTES = 256 * 1024
POLL_S = 2e-5


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Bytes of a state's and of a tree's slot. `inside`: the slots lie behind the words in the shared memory, else on a device."""

    state_bytes: int = STATE_BYTES
    trees_bytes: int = TREES_BYTES
    inside: bool = True

    @property
    def slots_bytes(self) -> int:
        """All slots together."""
        return SLOTS * (self.state_bytes + self.trees_bytes)

    @property
    def memory(self) -> SlotLayout:
        """Of the shared memory: its first page holds the words."""
        return SlotLayout(1, self.slots_bytes if self.inside else 1)

    def state_slot(self, number: int) -> int:
        """Return the byte offset of a round's state among the slots."""
        return number % SLOTS * self.state_bytes

    def trees_slot(self, number: int) -> int:
        """Return the byte offset of a round's trees among the slots."""
        return SLOTS * self.state_bytes + number % SLOTS * self.trees_bytes

    def check(self) -> BlobLayout:
        """Return the layout of a peer if its sizes can be served; raise ProtocolError otherwise."""
        sizes = (self.state_bytes, self.trees_bytes)
        if not all(0 < size <= MAX_SLOT_BYTES // 8 and size % 256 == 0 for size in sizes):
            raise ProtocolError(
                f"A mailbox for rounds of {sizes[0]} and {sizes[1]} bytes is beyond the limits.",
                field="rounds",
            )
        return self


class BlobMailbox(Protocol):
    """One side of the exchange. `send` and `receive` are for one thread, `close` for any.

    Attributes:
        layout: Largest blobs.
        broken: A wait was ended since `mend` without what it was for; the peer is late or gone.
    """

    layout: BlobLayout

    @property
    def broken(self) -> bool:
        """See above."""
        ...

    def send(self, number: int, blob: torch.Tensor) -> None:
        """Give this side's blob of a round, ``[n] uint8``; its header is set to the number. In stream order."""
        ...

    def receive(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """Have the peer's blob of a round come into `blob`, in stream order, and set ``expected [1] int32`` to the number.

        What comes after the limit does not come: `blob` then holds another number in its header.
        """
        ...

    def skip(self, number: int) -> None:
        """Say that nothing comes for a round, in stream order."""
        ...

    def mend(self) -> bool:
        """Forget that a wait was ended, once all are over; False while they are not."""
        ...

    def close(self) -> None:
        """End every wait, now and from now on."""
        ...


class HostMailbox:
    """`BlobMailbox` between two processes without GPUs: what is enqueued elsewhere happens at once, and the host waits."""

    def __init__(self, layout: BlobLayout, memory: SharedMemory, side: Side) -> None:
        self.layout = layout
        self.broken = False
        self._words = Doorbells(memory, side)
        self._slots = torch.frombuffer(memory.slot(0, layout.slots_bytes), dtype=torch.uint8)
        self._closed = False
        out, back = (
            (layout.state_slot, layout.trees_slot)
            if side is Side.TARGET
            else (layout.trees_slot, layout.state_slot)
        )
        self._out, self._in = out, back

    def send(self, number: int, blob: torch.Tensor) -> None:
        """See `BlobMailbox.send`."""
        blob[:4].view(torch.int32).fill_(number)
        start = self._out(number)
        self._slots[start : start + blob.nbytes].copy_(blob)
        self._words.give(number)

    def receive(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """See `BlobMailbox.receive`."""
        expected.fill_(number)
        until = time.monotonic() + limit_s
        while self._words.awaited < number and not self._closed and not self.broken:
            if time.monotonic() > until:
                self.broken = True
            time.sleep(POLL_S)
        if self._words.awaited < number:
            return
        start = self._in(number)
        blob.copy_(self._slots[start : start + blob.nbytes])

    def skip(self, number: int) -> None:
        """See `BlobMailbox.skip`."""
        self._words.give(number)

    def mend(self) -> bool:
        """See `BlobMailbox.mend`."""
        self.broken = self._closed
        return True

    def close(self) -> None:
        """See `BlobMailbox.close`."""
        self._closed = self.broken = True
