"""Which mailboxes a connection has: the target offers, the draft maps them or says why it cannot, and then the target offers others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.cuda import HANDLE_BYTES, CudaError, DeviceMemory, PeerMemory
from outrider.shared.rpc.ipc.cuda_mailbox import CudaTensorReader, CudaTensorWriter
from outrider.shared.rpc.ipc.mailbox import SharedTensorReader, SharedTensorWriter
from outrider.shared.rpc.ipc.slots import Layout, SharedMemory
from outrider.shared.rpc.tensors import MAX_CHUNK_BYTES, TensorReader, TensorWriter

SESSION_LAYOUT = (4, 4 * 1024 * 1024)
"""Slots and bytes: a frame holds the rows of one round, 3 MiB for 64 sequences of 6 rows of 4096 in bf16."""
BULK_LAYOUT = (8, MAX_CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Offered:
    """Mailboxes of the writing side. `files` go beside the offer, then `sent` closes them; `close` frees what the slots lie in."""

    offer: draft_pb2.MailboxOffer
    files: Sequence[int]
    session: TensorWriter
    bulk: TensorWriter
    close: Callable[[], None]

    def sent(self) -> None:
        """Close the descriptors, which the peer has now."""
        for file in self.files:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Mapped:
    """Mailboxes of the reading side; each is closed by the thread that reads it."""

    session: TensorReader
    bulk: TensorReader


def offers(device: torch.device) -> Sequence[Callable[[], Offered]]:
    """Return what a writer whose rows are on `device` offers, best first; a way may raise `CudaError`."""
    shared = [lambda: _offer_shared()]
    return shared if device.type == "cpu" else [lambda: _offer_cuda(device), *shared]


def _offer_shared() -> Offered:
    with contextlib.ExitStack() as made:
        memories = [_create(made, Layout(*sizes)) for sizes in (SESSION_LAYOUT, BULK_LAYOUT)]
        boxes = [_describe(memory) for memory, _file in memories]
        writers = [SharedTensorWriter(memory) for memory, _file in memories]
        made.pop_all()
    offer = draft_pb2.MailboxOffer(session=boxes[0], bulk=boxes[1])
    return Offered(offer, [file for _memory, file in memories], writers[0], writers[1], lambda: None)


def _offer_cuda(device: torch.device) -> Offered:
    with contextlib.ExitStack() as made:
        boxes, files, writers, close = [], [], [], contextlib.ExitStack()
        for sizes in (SESSION_LAYOUT, BULK_LAYOUT):
            memory, file = _create(made, Layout(*sizes, slots_inside=False))
            slots = DeviceMemory(memory.layout.slots * memory.layout.slot_bytes, device)
            made.callback(slots.close)
            boxes.append(_describe(memory, slots.handle()))
            files.append(file)
            writers.append(CudaTensorWriter(memory, slots, device))
            close.callback(slots.close)
        made.pop_all()
    return Offered(draft_pb2.MailboxOffer(session=boxes[0], bulk=boxes[1]), files, writers[0], writers[1], close.close)


def _create(made: contextlib.ExitStack, layout: Layout) -> tuple[SharedMemory, int]:
    memory, file = SharedMemory.create(layout)
    made.callback(os.close, file)
    return memory, file


def _describe(memory: SharedMemory, handle: bytes = b"") -> draft_pb2.Mailbox:
    return draft_pb2.Mailbox(slots=memory.layout.slots, slot_bytes=memory.layout.slot_bytes, cuda_handle=handle)


def accept(offer: draft_pb2.MailboxOffer, files: Sequence[int], device: torch.device) -> Mapped:
    """Map what was offered.

    Args:
        offer: Of the target.
        files: One per mailbox; closed here.
        device: Where rows are wanted.

    Raises:
        CudaError: the device memory cannot be mapped from `device`.
        ProtocolError: the offer is malformed.
    """
    with contextlib.ExitStack() as opened:
        for file in files:
            opened.callback(os.close, file)
        with contextlib.ExitStack() as mapped:
            session = _reader(offer.session, files[0], device, mapped, wait=False)
            bulk = _reader(offer.bulk, files[1], device, mapped, wait=True)
            mapped.pop_all()
    return Mapped(session, bulk)


def _reader(box: draft_pb2.Mailbox, file: int, device: torch.device, mapped: contextlib.ExitStack, *, wait: bool) -> TensorReader:
    layout = Layout(box.slots, box.slot_bytes, slots_inside=not box.cuda_handle).check()
    memory = SharedMemory.attach(layout, file)
    if not box.cuda_handle:
        return SharedTensorReader(memory, device)
    if device.type != "cuda":
        raise CudaError("the draft runs on the CPU")
    if len(box.cuda_handle) != HANDLE_BYTES:
        raise ProtocolError(f"A CUDA IPC handle of {len(box.cuda_handle)} bytes.", field="cuda_handle")
    reader = CudaTensorReader(memory, PeerMemory(box.cuda_handle, device), device, wait=wait)
    mapped.callback(reader.close)
    return reader


def acknowledge(offer: draft_pb2.MailboxOffer, files: Sequence[int], device: torch.device) -> tuple[draft_pb2.MailboxAck, Mapped | None]:
    """Answer an offer: mapped, or refused with the reason; a malformed one raises ProtocolError."""
    try:
        mapped = accept(offer, files, device)
    except CudaError as error:
        return draft_pb2.MailboxAck(reason=error.message), None
    return draft_pb2.MailboxAck(accepted=True), mapped
