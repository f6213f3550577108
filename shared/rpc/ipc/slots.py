"""Records which slots of a mailbox are in use, with two counters per slot in shared memory.

The writer increments the counter `written`, and the reader sets the counter `released`. Both counters count
the uses of the slot. The slot is free if the two counters are equal.

    writer                                          reader
    find a slot with released = written
    fill it
    written += 1
    send (slot, generation = written)        →      copy the rows out
                                                    check that written is still generation
                                                    released = generation

Each side keeps a private copy of its own counters. A wrong value in the shared memory has limited effects:

- If `written` is wrong, only the rows of one message are lost.
- If `released` is wrong, the connection fails, because the slot would otherwise never be free again.

Neither side ever waits. If no slot is free, the tensor's rows are sent in the message, or later.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from outrider.shared.base.errors import ProtocolError

COUNTER = struct.Struct("@Q")
"""Format of a counter, in native byte order, because both sides are on one host.

`struct` accesses a value in native byte order as a whole. With an explicit byte order, it would access single
bytes.
"""
WRITTEN, RELEASED = 0, COUNTER.size
ENTRY_BYTES = 64
"""Bytes of a slot's two counters. Each slot's counters have their own cache line."""
PAGE_BYTES = 4096
MAX_SLOTS = 64
MAX_SLOT_BYTES = 64 * 1024 * 1024
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Number, size and place of the slots of a mailbox.

    Attributes:
        slots: Number of slots.
        slot_bytes: Bytes of each slot.
        slots_inside: True if the slots are in the shared memory, after the counters. False if they are on a
            device.
    """

    slots: int
    slot_bytes: int
    slots_inside: bool = True

    @property
    def data_start(self) -> int:
        """Byte offset of slot 0."""
        return -(-self.slots * ENTRY_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Size of the shared memory."""
        return self.data_start + (self.slots * self.slot_bytes if self.slots_inside else 0)

    def check(self) -> SlotLayout:
        """Return this layout, which a peer announced. Raise ProtocolError if a size is not acceptable."""
        if not (1 <= self.slots <= MAX_SLOTS and 1 <= self.slot_bytes <= MAX_SLOT_BYTES):
            raise ProtocolError(
                f"A mailbox has {self.slots} slots of {self.slot_bytes} bytes, which is outside the limits.",
                field="mailbox",
            )
        return self


class SharedMemory:
    """Shared memory without a name, mapped by two processes.

    The size of the memory is sealed. Otherwise, one process could truncate the memory and crash the other
    process.
    """

    def __init__(self, layout: SlotLayout, file: int) -> None:
        self.layout = layout
        self._map = mmap.mmap(file, layout.total_bytes)
        self.bytes = memoryview(self._map)

    @classmethod
    def create(cls, layout: SlotLayout) -> tuple[SharedMemory, int]:
        """Make zeroed memory. Return it with a file descriptor for the peer. The caller closes the file."""
        file = os.memfd_create("outrider-mailbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, layout.total_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        return cls(layout, file), file

    @classmethod
    def attach(cls, layout: SlotLayout, file: int) -> SharedMemory:
        """Map the memory of a peer. The caller closes `file`.

        Raises:
            ProtocolError: The file is not sealed memory, or does not have the layout's size.
        """
        try:
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
        except OSError:
            sealed = False
        if not sealed or os.fstat(file).st_size != layout.total_bytes:
            raise ProtocolError("The mailbox is not sealed memory of the announced size.", field="mailbox")
        return cls(layout, file)

    def close(self) -> None:
        """Unmap the memory, which otherwise stays mapped until the last reference to it is gone."""
        self.bytes.release()
        self._map.close()

    def counter(self, slot: int, which: int) -> int:
        """Return a slot's counter; `which` is `WRITTEN` or `RELEASED`."""
        value: int = COUNTER.unpack_from(self.bytes, slot * ENTRY_BYTES + which)[0]
        return value

    def set_counter(self, slot: int, which: int, value: int) -> None:
        """Set a slot's counter; `which` is `WRITTEN` or `RELEASED`."""
        COUNTER.pack_into(self.bytes, slot * ENTRY_BYTES + which, value)

    def slot(self, slot: int, num_bytes: int) -> memoryview:
        """Return the first `num_bytes` of a slot."""
        start = self.layout.data_start + slot * self.layout.slot_bytes
        return self.bytes[start : start + num_bytes]


class SlotWriter:
    """The writing side's record of its slots. Use from one thread at a time."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._written = [0] * memory.layout.slots
        self._next = 0

    def take(self) -> int | None:
        """Return the index of a free slot to fill, or None if all slots are in use.

        The slot is in use from the call of `publish` until the reader releases it.

        Raises:
            ProtocolError: A slot's `released` counter is neither the last generation that was published nor
                the generation before it.
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
                    f"Slot {slot}: the peer released generation {released}, but {written} was written last.",
                    field="released",
                )
        return None

    def publish(self, slot: int) -> int:
        """Mark a filled slot as in use. Return the generation to name in the message."""
        self._written[slot] += 1
        self._memory.set_counter(slot, WRITTEN, self._written[slot])
        return self._written[slot]


class SlotReader:
    """The reading side's record of the slots. Use from one thread at a time."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._released = [0] * memory.layout.slots

    def check(self, slot: int, generation: int, num_bytes: int) -> None:
        """Check the slot that a message names, before its bytes are read.

        Raises:
            ProtocolError: The slot does not exist, is smaller than `num_bytes`, or no longer has the
                generation that the message names.
        """
        layout = self._memory.layout
        if slot >= layout.slots:
            raise ProtocolError(f"Slot {slot} does not exist: the mailbox has {layout.slots}.", field="slot")
        if num_bytes > layout.slot_bytes:
            raise ProtocolError(
                f"A message names {num_bytes} bytes in a slot of {layout.slot_bytes}.", field="num_bytes"
            )
        if generation != self._released[slot] + 1 or not self.holds(slot, generation):
            raise ProtocolError(
                f"Slot {slot}: the message names generation {generation}, but "
                f"{self._memory.counter(slot, WRITTEN)} was written last "
                f"and {self._released[slot]} read last.",
                field="generation",
            )

    def holds(self, slot: int, generation: int) -> bool:
        """Return whether the slot still has this generation."""
        return self._memory.counter(slot, WRITTEN) == generation

    def release(self, slot: int, generation: int) -> None:
        """Release the slot after its bytes were copied.

        Raises:
            ProtocolError: The slot was overwritten during the copy.
        """
        if not self.holds(slot, generation):
            raise ProtocolError(
                f"Slot {slot} was overwritten while generation {generation} was being read.",
                field="generation",
            )
        self._released[slot] = generation
        self._memory.set_counter(slot, RELEASED, generation)
