"""Transfers tensors through a mailbox in shared memory. If none of its slots is free, rows wait.

Rows that cannot wait are sent inside their message instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from outrider.common.v1 import common_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.slots import SharedMemory, SlotReader, SlotWriter
from outrider.shared.rpc.tensors import TensorWriter, decode_tensor, encode_tensor, read_shape, wire_dtype


class SlotTensorWriter(TensorWriter, Protocol):
    """A `TensorWriter` that puts rows into the slots of a mailbox.

    Attributes:
        slot_bytes: Size of a slot.
    """

    slot_bytes: int

    def offer(self, rows: torch.Tensor) -> common_pb2.TensorData | None:
        """Copy a tensor ``[rows, columns]`` to a slot and return the message, or None if no slot is free.

        Before the call, the work that computes the rows must have finished.
        """
        ...


class SharedTensorWriter:
    """A `SlotTensorWriter` into shared memory. It copies rows from a GPU synchronously."""

    def __init__(self, memory: SharedMemory) -> None:
        self.slot_bytes = memory.layout.slot_bytes
        self._memory = memory
        self._ledger = SlotWriter(memory)

    def write(self, parts: Sequence[torch.Tensor]) -> common_pb2.TensorData:
        """Return the message for the concatenated parts. They are in a slot if possible, otherwise inline."""
        found = self._into_slot(parts)
        return (
            found
            if found is not None
            else encode_tensor(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
        )

    def offer(self, rows: torch.Tensor) -> common_pb2.TensorData | None:
        """Copy rows to a free slot of the mailbox, and return the message that refers to the slot.

        Return None if no slot is free, or if the rows are too large for a slot.
        """
        return self._into_slot([rows])

    def _into_slot(self, parts: Sequence[torch.Tensor]) -> common_pb2.TensorData | None:
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        dtype = parts[0].dtype
        num_bytes = rows * columns * dtype.itemsize
        slot = self._ledger.take() if 0 < num_bytes <= self.slot_bytes else None
        if slot is None:
            return None
        there = torch.frombuffer(self._memory.slot(slot, num_bytes), dtype=dtype).view(rows, columns)
        row = 0
        for part in parts:
            there[row : row + part.shape[0]].copy_(part)
            row += part.shape[0]
        where = common_pb2.SharedSlot(slot=slot, generation=self._ledger.publish(slot), num_bytes=num_bytes)
        return common_pb2.TensorData(shape=(rows, columns), dtype=wire_dtype(dtype), shared_memory=where)


class SharedTensorReader:
    """The `TensorReader` for a `SharedTensorWriter`'s mailbox.

    Args:
        memory: The writer's memory, mapped.
        device: Device of the returned tensors.
    """

    def __init__(self, memory: SharedMemory, device: torch.device) -> None:
        self._memory = memory
        self._ledger = SlotReader(memory)
        self._device = device

    def read(self, data: common_pb2.TensorData, name: str, columns: int) -> torch.Tensor:
        """Return the rows of a message, copied out of their slot."""
        if data.WhichOneof("data") != "shared_memory":
            return decode_tensor(data, name=name, columns=columns).to(self._device)
        where = data.shared_memory
        shape, dtype = read_shape(data, where.num_bytes, name, columns)
        self._ledger.check(where.slot, where.generation, where.num_bytes)
        if not prod(shape):
            raise ProtocolError(f"{name}: the message names a slot but has no rows.", field=name)
        there = torch.frombuffer(self._memory.slot(where.slot, where.num_bytes), dtype=dtype).view(shape)
        rows = there.clone() if self._device.type == "cpu" else there.to(self._device)
        self._ledger.release(where.slot, where.generation)
        return rows

    def close(self) -> None:
        """Unmap the shared memory."""
        self._memory.close()
