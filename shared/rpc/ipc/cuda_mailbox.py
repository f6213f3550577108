"""Mailbox for tensors in GPU memory: the slots are in the writer's GPU memory, the counters in host memory.

The counters are in memory that both processes share. The reader also maps the writer's GPU memory. The
processes are synchronised by their CPUs, not by GPU streams:

- The writer names a slot in a message after the copies into the slot have finished.
- The reader checks and releases the slot after the copies out of the slot have finished. A reader that does
  not wait for these copies checks and releases the slot in a later `read`.

No stream ever waits for the other process, which may be dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from outrider.common.v1 import common_pb2
from outrider.shared.rpc.ipc.cuda import DeviceMemory, PeerMemory, copy_async
from outrider.shared.rpc.ipc.slots import SharedMemory, SlotReader, SlotWriter
from outrider.shared.rpc.tensors import decode_tensor, encode_tensor, read_shape, wire_dtype


class CudaTensorWriter:
    """A `SlotTensorWriter` that copies tensors from a GPU to a mailbox's slots on the same GPU.

    Args:
        ledger: The counters of the slots, with the layout of the mailbox.
        memory: The memory of the slots, ``slots * slot_bytes`` bytes of this process on `device`.
        device: The GPU with the tensors to send.
    """

    def __init__(self, ledger: SharedMemory, memory: DeviceMemory, device: torch.device) -> None:
        self.slot_bytes = ledger.layout.slot_bytes
        self._ledger = SlotWriter(ledger)
        self._memory = memory
        self._device = device
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def write(self, parts: Sequence[torch.Tensor]) -> common_pb2.TensorData:
        """Copy rows of tensors to a free slot, or into the message if no slot is free. Return the message.

        This method waits for the copies. They finish a few µs after the rows have been computed.
        """
        num_bytes = sum(part.nbytes for part in parts)
        on_device = all(part.device == self._device for part in parts)
        slot = self._ledger.take() if on_device and 0 < num_bytes <= self.slot_bytes else None
        if slot is None:
            return encode_tensor(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
        return self._fill(slot, parts, torch.cuda.current_stream(self._device))

    def offer(self, rows: torch.Tensor) -> common_pb2.TensorData | None:
        """Copy rows to a slot and return the message, or None if no slot is free or the rows are too large.

        The copy uses a separate stream and therefore does not wait for the work of the current stream. The
        rows may also be on the host.
        """
        slot = self._ledger.take() if 0 < rows.nbytes <= self.slot_bytes else None
        return None if slot is None else self._fill(slot, [rows], self._beside)

    def _fill(
        self, slot: int, parts: Sequence[torch.Tensor], stream: torch.cuda.Stream
    ) -> common_pb2.TensorData:
        there = start = self._memory.pointer + slot * self.slot_bytes
        kept = [part.contiguous() for part in parts]  # keeps the tensors alive until the copies are done
        with torch.cuda.stream(stream):
            for part in kept:
                copy_async(there, part.data_ptr(), part.nbytes, self._device)
                there += part.nbytes
        stream.synchronize()
        shape = (sum(part.shape[0] for part in kept), kept[0].shape[1])
        where = common_pb2.SharedSlot(
            slot=slot, generation=self._ledger.publish(slot), num_bytes=there - start
        )
        return common_pb2.TensorData(shape=shape, dtype=wire_dtype(kept[0].dtype), cuda_ipc=where)


class CudaTensorReader:
    """A `TensorReader` for the mailbox of a `CudaTensorWriter` on the same GPU or another GPU of the host.

    Args:
        ledger: The writer's counters, mapped into this process.
        memory: The writer's slots, mapped into this process.
        device: Device of the returned tensors. Use the tensors on the device's current stream.
        wait: If True, `read` copies on a separate stream, waits for the copy, and then releases the slot.
            Intended for the rows of long prompts. If False, `read` only enqueues the copy.
    """

    def __init__(self, ledger: SharedMemory, memory: PeerMemory, device: torch.device, *, wait: bool) -> None:
        self._layout = ledger.layout
        self._shared = ledger
        self._ledger = SlotReader(ledger)
        self._memory = memory
        self._device = device
        self._beside = torch.cuda.Stream(device) if wait else None  # type: ignore[no-untyped-call]
        self._copying: deque[tuple[torch.cuda.Event, int, int]] = deque()

    def read(self, data: common_pb2.TensorData, name: str, columns: int) -> torch.Tensor:
        """Copy the rows of a message out of their slot of the mailbox, and return the copy.

        Raises:
            ProtocolError: The message is malformed, or rows were overwritten while this or an earlier `read`
                copied them.
        """
        self._release_copied()
        if data.WhichOneof("data") != "cuda_ipc":
            return decode_tensor(data, name=name, columns=columns).to(self._device)
        where = data.cuda_ipc
        shape, dtype = read_shape(data, where.num_bytes, name, columns)
        self._ledger.check(where.slot, where.generation, where.num_bytes)
        source = self._memory.pointer + where.slot * self._layout.slot_bytes
        if self._beside is None:
            rows = self._copy(source, shape, dtype, where.num_bytes)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._device))
            self._copying.append((done, where.slot, where.generation))
            return rows
        user = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._beside):
            rows = self._copy(source, shape, dtype, where.num_bytes)
        self._beside.synchronize()
        rows.record_stream(user)
        self._ledger.release(where.slot, where.generation)
        return rows

    def close(self) -> None:
        """Wait for the copies, and unmap the peer's memory."""
        for done, _slot, _generation in self._copying:
            done.synchronize()
        self._memory.close()
        self._shared.close()

    def _copy(self, source: int, shape: Sequence[int], dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
        rows = torch.empty(shape, dtype=dtype, device=self._device)
        copy_async(rows.data_ptr(), source, num_bytes, self._device)
        return rows

    def _release_copied(self) -> None:
        while self._copying and self._copying[0][0].query():  # type: ignore[no-untyped-call]
            _done, slot, generation = self._copying.popleft()
            self._ledger.release(slot, generation)
