"""The ledger of a mailbox: which slots of a shared memory are in use, told by two counters a slot. Knows nothing of tensors.

The writer owns `written`, the reader `released`; both count uses of the slot, so the slot is free when they are equal. The writer fills a
free slot, raises `written` and only then names (slot, generation) in a message; the reader copies the rows out, looks again whether
`written` still is that generation, and sets `released` to it. Each side keeps its own counters to itself and never believes the shared copy
of them: nonsense in a slot that is to be read costs the rows of that message, and nonsense in `released` is an error of the connection, as
the slot would never be free again. No side ever waits: without a free slot rows travel in the message, or later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from outrider.shared.base.errors import ProtocolError

COUNTER = struct.Struct("@Q")
"""Native, as both sides are on one host: read and written whole, while a format with a byte order goes byte by byte."""
WRITTEN, RELEASED = 0, COUNTER.size
ENTRY_BYTES = 64
"""Two counters a slot, a cache line apart from the next slot's."""
PAGE_BYTES = 4096
MAX_SLOTS = 64
MAX_SLOT_BYTES = 64 * 1024 * 1024
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Sizes of a mailbox: `slots` of `slot_bytes` each; with `slots_inside` they lie behind the counters, else on a device."""

    slots: int
    slot_bytes: int
    slots_inside: bool = True

    @property
    def data_start(self) -> int:
        """Byte offset of slot 0."""
        return -(-self.slots * ENTRY_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of shared memory."""
        return self.data_start + (self.slots * self.slot_bytes if self.slots_inside else 0)

    def check(self) -> SlotLayout:
        """Return the layout of a peer if its sizes can be served; raise ProtocolError otherwise."""
        if not (1 <= self.slots <= MAX_SLOTS and 1 <= self.slot_bytes <= MAX_SLOT_BYTES):
            raise ProtocolError(
                f"A mailbox of {self.slots} slots of {self.slot_bytes} bytes is beyond the limits.",
                field="mailbox",
            )
        return self


class SharedMemory:
    """Anonymous memory that two processes have mapped. Its size is sealed: neither can make the other fault by cutting it."""

    def __init__(self, layout: SlotLayout, file: int) -> None:
        self.layout = layout
        self._map = mmap.mmap(file, layout.total_bytes)
        self.bytes = memoryview(self._map)

    @classmethod
    def create(cls, layout: SlotLayout) -> tuple[SharedMemory, int]:
        """Make memory of zeros; returns it and the descriptor to hand over, which the caller closes."""
        file = os.memfd_create("outrider-mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, layout.total_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        return cls(layout, file), file

    @classmethod
    def attach(cls, layout: SlotLayout, file: int) -> SharedMemory:
        """Map what a peer handed over; the caller closes `file`.

        Raises:
            ProtocolError: it is no sealed memory, or not of the layout's size.
        """
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:
            sealed = False
        if not sealed or os.fstat(file).st_size != layout.total_bytes:
            raise ProtocolError("The mailbox is no sealed memory of the announced size.", field="mailbox")
        return cls(layout, file)

    def close(self) -> None:
        """Unmap it. Without this it is unmapped when nobody refers to it any more."""
        self.bytes.release()
        self._map.close()

    def counter(self, slot: int, which: int) -> int:
        """Return `WRITTEN` or `RELEASED` of a slot."""
        value: int = COUNTER.unpack_from(self.bytes, slot * ENTRY_BYTES + which)[0]
        return value

    def set_counter(self, slot: int, which: int, value: int) -> None:
        """Set `WRITTEN` or `RELEASED` of a slot."""
        COUNTER.pack_into(self.bytes, slot * ENTRY_BYTES + which, value)

    def slot(self, slot: int, num_bytes: int) -> memoryview:
        """Return the first bytes of a slot."""
        start = self.layout.data_start + slot * self.layout.slot_bytes
        return self.bytes[start : start + num_bytes]


class SlotWriter:
    """The writing side's ledger. One thread at a time."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._written = [0] * memory.layout.slots
        self._next = 0

    def take(self) -> int | None:
        """Return a free slot to fill, or None; taken again after `publish` and the reader's release only.

        Raises:
            ProtocolError: `released` of a slot is neither what was written last nor the one before.
        """
        slots = len(self._written)
        for offset in range(slots):
            slot = (self._next + offset) % slots
            released, written = self._memory.counter(slot, RELEASED), self._written[slot]
            if released == written:
                self._next = (slot + 1) % slots
                return slot
            if released != written - 1:
                raise ProtocolError(
                    f"Slot {slot}: generation {released} was given back, {written} written last.",
                    field="released",
                )
        return None

    def publish(self, slot: int) -> int:
        """Declare a taken slot full; returns the generation to name in the message."""
        self._written[slot] += 1
        self._memory.set_counter(slot, WRITTEN, self._written[slot])
        return self._written[slot]


class SlotReader:
    """The reading side's ledger. One thread at a time."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._released = [0] * memory.layout.slots

    def check(self, slot: int, generation: int, num_bytes: int) -> None:
        """Check what a message names before its bytes are read.

        Raises:
            ProtocolError: no such slot, more bytes than it holds, or the slot holds another generation.
        """
        layout = self._memory.layout
        if slot >= layout.slots:
            raise ProtocolError(f"Slot {slot} of a mailbox of {layout.slots}.", field="slot")
        if num_bytes > layout.slot_bytes:
            raise ProtocolError(f"{num_bytes} bytes in a slot of {layout.slot_bytes}.", field="num_bytes")
        if generation != self._released[slot] + 1 or not self.holds(slot, generation):
            raise ProtocolError(
                f"Slot {slot}: the message names generation {generation}, "
                f"{self._memory.counter(slot, WRITTEN)} was written, {self._released[slot]} read.",
                field="generation",
            )

    def holds(self, slot: int, generation: int) -> bool:
        """Whether the slot still holds this generation."""
        return self._memory.counter(slot, WRITTEN) == generation

    def release(self, slot: int, generation: int) -> None:
        """Give the slot back once its bytes are copied.

        Raises:
            ProtocolError: it was written anew while they were.
        """
        if not self.holds(slot, generation):
            raise ProtocolError(
                f"Slot {slot} was written anew while generation {generation} was read.", field="generation"
            )
        self._released[slot] = generation
        self._memory.set_counter(slot, RELEASED, generation)
