"""Exchanges blobs between two processes: interface, memory layout, and the implementation without GPUs.

A blob is a contiguous block of bytes (`shared.spec.resident`). In every round, the target sends one blob with
the state of its batch. The draft replies with one blob of trees.

Each direction has two slots, which are used in turn, and a word in shared memory that announces the latest
blob (`doorbells`). A side whose wait ended without the peer's blob sends at most one more blob. Two slots are
therefore enough.
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
"""Largest state in bytes. A state of 64 sequences with 16 bf16 rows of width 4096 each takes 8 MiB.

With 6 rows for each sequence, the state takes 3 MiB. Rounds with a larger state go through the host.
"""
TREES_BYTES = 256 * 1024
POLL_S = 2e-5


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Memory layout of a mailbox for the states and draft trees of rounds.

    Attributes:
        state_bytes: Size of a slot for states.
        trees_bytes: Size of a slot for trees.
        inside: True if the slots are in shared memory, after the words of `doorbells`. False if they are on a
            device.
    """

    state_bytes: int = STATE_BYTES
    trees_bytes: int = TREES_BYTES
    inside: bool = True

    @property
    def slots_bytes(self) -> int:
        """Size of all slots together."""
        return SLOTS * (self.state_bytes + self.trees_bytes)

    @property
    def memory(self) -> SlotLayout:
        """Layout of the shared memory. Its first page contains the words."""
        return SlotLayout(1, self.slots_bytes if self.inside else 1)

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        """Return True if a state and trees of these sizes fit into their slots."""
        return state.nbytes <= self.state_bytes and trees.nbytes <= self.trees_bytes

    def state_slot(self, number: int) -> int:
        """Return the byte offset of a round's state within the memory of the slots."""
        return number % SLOTS * self.state_bytes

    def trees_slot(self, number: int) -> int:
        """Return the byte offset of a round's trees within the memory of the slots."""
        return SLOTS * self.state_bytes + number % SLOTS * self.trees_bytes

    def check(self) -> BlobLayout:
        """Return this layout, which a peer announced. Raise ProtocolError if a size is not acceptable."""
        sizes = (self.state_bytes, self.trees_bytes)
        if not all(0 < size <= MAX_SLOT_BYTES // 8 and size % 256 == 0 for size in sizes):
            raise ProtocolError(
                f"A mailbox for rounds has slots of {sizes[0]} and {sizes[1]} bytes, "
                "which is outside the limits.",
                field="rounds",
            )
        return self


class BlobMailbox(Protocol):
    """One side of a mailbox for blobs. A blob contains the states or the trees of one round.

    Only one thread may call `send` and `receive`. Any thread may call `close`.

    Attributes:
        layout: Sizes of the slots. A blob must fit into its slot.
        broken: True if the peer was late or gone: a wait has ended without the peer's blob since the last
            successful `mend`.
    """

    layout: BlobLayout

    @property
    def broken(self) -> bool:
        """True if a wait has ended without its blob since the last successful `mend`."""
        ...

    def send(self, number: int, blob: torch.Tensor) -> None:
        """Send this side's blob of a round, ``[n] uint8``, in stream order.

        Sets the round's number in the blob's header.
        """
        ...

    def receive(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """Copy the peer's blob of a round into `blob`.

        The copy runs in stream order. The tensor ``expected [1] int32`` is set to `number`, the number of the
        round. If the peer's blob does not arrive within `limit_s` seconds, the wait ends. The header of
        `blob` then contains another number.
        """
        ...

    def skip(self, number: int) -> None:
        """Announce, in stream order, that no blob follows for a round."""
        ...

    def mend(self) -> bool:
        """Reset `broken` once all waits are over. Return False while a wait is still running."""
        ...

    def close(self) -> None:
        """End all waits, current and future."""
        ...


class HostMailbox:
    """A `BlobMailbox` between two processes without GPUs. Its `receive` blocks the calling thread."""

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
        """Copy the blob to its slot and announce it."""
        blob[:4].view(torch.int32).fill_(number)
        start = self._out(number)
        self._slots[start : start + blob.nbytes].copy_(blob)
        self._words.give(number)

    def receive(self, number: int, blob: torch.Tensor, expected: torch.Tensor, limit_s: float) -> None:
        """Wait on the host for the peer's blob, and copy it."""
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
        """Announce that no blob follows for a round."""
        self._words.give(number)

    def mend(self) -> bool:
        """Reset `broken` unless the mailbox is closed.

        Always returns True, because no wait is ever pending here.
        """
        self.broken = self._closed
        return True

    def close(self) -> None:
        """End the current wait and all future ones."""
        self._closed = self.broken = True
