"""Tensors through a mailbox on a GPU: the ledger is in shared memory, the slots in device memory of the writer that the reader has mapped.

Order between the processes is made on the host: the writer names a slot after its copies are done, the reader gives it back after its own
are. So no stream ever waits for another process, which may be dead.
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
    """`TensorWriter` of rows of a GPU into its own memory.

    Args:
        ledger: The counters; its layout says how large a slot is.
        memory: Of ``slots * slot_bytes``.
        device: Where the rows are.
    """

    def __init__(self, ledger: SharedMemory, memory: DeviceMemory, device: torch.device) -> None:
        self._layout = ledger.layout
        self._ledger = SlotWriter(ledger)
        self._memory = memory
        self._device = device

    def write(self, parts: Sequence[torch.Tensor]) -> common_pb2.TensorData:
        """See `TensorWriter.write`. Waits for the copies, a few microseconds after the work that made the rows."""
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        dtype = parts[0].dtype
        num_bytes = rows * columns * dtype.itemsize
        on_device = all(part.device == self._device for part in parts)
        slot = self._ledger.take() if on_device and 0 < num_bytes <= self._layout.slot_bytes else None
        if slot is None:
            return encode_tensor(parts[0] if len(parts) == 1 else torch.cat(list(parts)))
        there = self._memory.pointer + slot * self._layout.slot_bytes
        kept = [part.contiguous() for part in parts]  # alive until the copies are done
        for part in kept:
            copy_async(there, part.data_ptr(), part.nbytes, self._device)
            there += part.nbytes
        torch.cuda.current_stream(self._device).synchronize()
        where = common_pb2.SharedSlot(slot=slot, generation=self._ledger.publish(slot), num_bytes=num_bytes)
        return common_pb2.TensorData(shape=(rows, columns), dtype=wire_dtype(dtype), cuda_ipc=where)


class CudaTensorReader:
    """`TensorReader` of a `CudaTensorWriter`'s mailbox, on the same GPU or another one of the host.

    Args:
        ledger: The counters, mapped.
        memory: The slots, mapped.
        device: Where tensors are returned; their copies run on its current stream.
        wait: Wait for each copy, for readers whose rows are used on other streams.
    """

    def __init__(self, ledger: SharedMemory, memory: PeerMemory, device: torch.device, *, wait: bool) -> None:
        self._layout = ledger.layout
        self._shared = ledger
        self._ledger = SlotReader(ledger)
        self._memory = memory
        self._device = device
        self._wait = wait
        self._copying: deque[tuple[torch.cuda.Event, int, int]] = deque()

    def read(self, data: common_pb2.TensorData, name: str, columns: int) -> torch.Tensor:
        """See `TensorReader.read`."""
        self._release_copied()
        if data.WhichOneof("data") != "cuda_ipc":
            return decode_tensor(data, name=name, columns=columns).to(self._device)
        where = data.cuda_ipc
        shape, dtype = read_shape(data, where.num_bytes, name, columns)
        self._ledger.check(where.slot, where.generation, where.num_bytes)
        rows = torch.empty(shape, dtype=dtype, device=self._device)
        copy_async(rows.data_ptr(), self._memory.pointer + where.slot * self._layout.slot_bytes, where.num_bytes, self._device)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))
        self._copying.append((done, where.slot, where.generation))
        if self._wait:
            done.synchronize()
            self._release_copied()
        return rows

    def close(self) -> None:
        """Wait for the copies and unmap the peer's memory."""
        for done, _slot, _generation in self._copying:
            done.synchronize()
        self._memory.close()
        self._shared.close()

    def _release_copied(self) -> None:
        while self._copying and self._copying[0][0].query():  # type: ignore[no-untyped-call]
            _done, slot, generation = self._copying.popleft()
            self._ledger.release(slot, generation)
