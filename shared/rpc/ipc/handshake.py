"""Negotiates the mailboxes of a connection: the target offers memory, and the draft maps or refuses it.

In time order:

    target                                       draft
    MailboxOffer with file descriptors    →      maps the memory
                                          ←      MailboxAck: accepted, or the reason for refusing
    next best offer, if refused           →
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.ipc.blob_mailbox import BlobLayout, BlobMailbox, HostMailbox
from outrider.shared.rpc.ipc.cuda import HANDLE_BYTES, CudaError, DeviceMemory, PeerMemory
from outrider.shared.rpc.ipc.cuda_blob_mailbox import StreamMailbox
from outrider.shared.rpc.ipc.cuda_mailbox import CudaTensorReader, CudaTensorWriter
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.ipc.mailbox import SharedTensorReader, SharedTensorWriter, SlotTensorWriter
from outrider.shared.rpc.ipc.slots import SharedMemory, SlotLayout
from outrider.shared.rpc.tensors import MAX_CHUNK_BYTES, TensorReader, TensorWriter

SESSION_LAYOUT = (4, 4 * 1024 * 1024)
"""Number of slots and bytes per slot of the mailbox for the rows of rounds.

A slot holds the rows of one round. The rows of 64 sequences with 6 bf16 rows of width 4096 each take 3 MiB.
"""
BULK_LAYOUT = (8, MAX_CHUNK_BYTES)
"""Number of slots and bytes per slot of the mailbox for the rows of prompts, in host memory."""
BULK_LAYOUT_ON_GPU = (16, 4 * 1024 * 1024)
"""Number of slots and bytes per slot of the mailbox for the rows of prompts, in GPU memory.

A slot has room for 512 bf16 rows of width 4096.
"""

log = get_logger("outrider.rpc.ipc")


@dataclass(frozen=True, slots=True)
class Offered:
    """An offer of mailboxes to the peer, with the writing side of these mailboxes.

    Send `files` with the offer, then call `sent`. Use the mailbox `blobs` only if the peer's reply accepts
    this mailbox. A mailbox is freed when it is no longer referenced.
    """

    offer: draft_pb2.MailboxOffer
    files: Sequence[int]
    session: TensorWriter
    bulk: SlotTensorWriter
    blobs: BlobMailbox | None = None

    def sent(self) -> None:
        """Close the descriptors after they were sent to the peer."""
        for file in self.files:
            os.close(file)


@dataclass(frozen=True, slots=True)
class Mapped:
    """The mailboxes on the reading side. The thread that reads tensors from them must close them."""

    session: TensorReader
    bulk: TensorReader
    blobs: BlobMailbox | None = None


def offers(device: torch.device, *, blobs: bool = False) -> Sequence[Callable[[], Offered]]:
    """Return functions that each make one offer of mailboxes to the peer. The best offer comes first.

    Args:
        device: The device of the tensors to send.
        blobs: True to offer a mailbox for the states and trees of rounds too.

    Returns:
        Functions that make an offer or raise `CudaError`.
    """
    if device.type == "cpu":
        return [functools.partial(_offer, _shared, BULK_LAYOUT, _blobs_on_host if blobs else None)]
    on_gpu = functools.partial(_on_gpu, device=device)
    blobs_on_gpu = functools.partial(_blobs_on_gpu, device=device) if blobs else None
    return [
        functools.partial(_offer, on_gpu, BULK_LAYOUT_ON_GPU, blobs_on_gpu),
        functools.partial(_offer, _shared, BULK_LAYOUT, None),
    ]


Made = tuple[draft_pb2.Mailbox, int, SlotTensorWriter]
"""The description, the file descriptor and the writer of a mailbox."""


MadeBlobs = tuple[draft_pb2.RoundsMailbox, int, BlobMailbox]


def _offer(
    make: Callable[[tuple[int, int], contextlib.ExitStack], Made],
    bulk_layout: tuple[int, int],
    make_blobs: Callable[[contextlib.ExitStack], MadeBlobs] | None,
) -> Offered:
    with contextlib.ExitStack() as made:
        (session, first, writer), (bulk, second, bulk_writer) = (
            make(SESSION_LAYOUT, made),
            make(bulk_layout, made),
        )
        offer = draft_pb2.MailboxOffer(session=session, bulk=bulk)
        files: list[int] = [first, second]
        mailbox: BlobMailbox | None = None
        if make_blobs is not None:
            try:
                blobs, third, mailbox = make_blobs(made)
                offer.rounds.CopyFrom(blobs)
                files.append(third)
            except CudaError as error:
                log.warning("rounds go through the host", reason=error.message)
        made.pop_all()
    return Offered(offer, files, writer, bulk_writer, mailbox)


def _blobs_on_host(made: contextlib.ExitStack) -> MadeBlobs:
    layout = BlobLayout()
    memory, file = SharedMemory.create(layout.memory)
    made.callback(os.close, file)
    box = draft_pb2.RoundsMailbox(state_bytes=layout.state_bytes, trees_bytes=layout.trees_bytes)
    return box, file, HostMailbox(layout, memory, Side.TARGET)


def _blobs_on_gpu(made: contextlib.ExitStack, device: torch.device) -> MadeBlobs:
    layout = BlobLayout(inside=False)
    memory, file = SharedMemory.create(layout.memory)
    made.callback(os.close, file)
    slots = DeviceMemory(layout.slots_bytes, device)
    box = draft_pb2.RoundsMailbox(
        state_bytes=layout.state_bytes, trees_bytes=layout.trees_bytes, cuda_handle=slots.handle()
    )
    return box, file, StreamMailbox(layout, memory, slots, Side.TARGET, device)


def _shared(sizes: tuple[int, int], made: contextlib.ExitStack) -> Made:
    memory, file = SharedMemory.create(SlotLayout(*sizes))
    made.callback(os.close, file)
    return draft_pb2.Mailbox(slots=sizes[0], slot_bytes=sizes[1]), file, SharedTensorWriter(memory)


def _on_gpu(sizes: tuple[int, int], made: contextlib.ExitStack, device: torch.device) -> Made:
    ledger, file = SharedMemory.create(SlotLayout(*sizes, slots_inside=False))
    made.callback(os.close, file)
    slots = DeviceMemory(sizes[0] * sizes[1], device)
    box = draft_pb2.Mailbox(slots=sizes[0], slot_bytes=sizes[1], cuda_handle=slots.handle())
    return box, file, CudaTensorWriter(ledger, slots, device)


def accept(offer: draft_pb2.MailboxOffer, files: Sequence[int], device: torch.device) -> Mapped:
    """Map the mailboxes that the target offers into this process.

    Args:
        offer: The target's offer.
        files: One file descriptor per mailbox. The mailbox for rounds, if offered, comes last. This function
            closes the descriptors.
        device: Device of the tensors that the mailboxes return.

    Raises:
        CudaError: The device memory cannot be mapped from `device`.
        ProtocolError: The offer is malformed.
    """
    with contextlib.ExitStack() as opened:
        for file in files:
            opened.callback(os.close, file)
        with contextlib.ExitStack() as mapped:
            session = _reader(offer.session, files[0], device, mapped, wait=False)
            bulk = _reader(offer.bulk, files[1], device, mapped, wait=True)
            blobs = _blobs(offer.rounds, files[2], device) if offer.HasField("rounds") else None
            mapped.pop_all()
    return Mapped(session, bulk, blobs)


def _reader(
    box: draft_pb2.Mailbox, file: int, device: torch.device, mapped: contextlib.ExitStack, *, wait: bool
) -> TensorReader:
    layout = SlotLayout(box.slots, box.slot_bytes, slots_inside=not box.cuda_handle).check()
    memory = SharedMemory.attach(layout, file)
    if not box.cuda_handle:
        return SharedTensorReader(memory, device)
    if device.type != "cuda":
        raise CudaError("the draft runs on the CPU")
    if len(box.cuda_handle) != HANDLE_BYTES:
        raise ProtocolError(
            f"A CUDA IPC handle has the wrong size: {len(box.cuda_handle)} bytes.", field="cuda_handle"
        )
    reader = CudaTensorReader(memory, PeerMemory(box.cuda_handle, device), device, wait=wait)
    mapped.callback(reader.close)
    return reader


def _blobs(box: draft_pb2.RoundsMailbox, file: int, device: torch.device) -> BlobMailbox | None:
    """Map a mailbox for rounds. Return None if this is impossible; rounds then go through the host."""
    layout = BlobLayout(box.state_bytes, box.trees_bytes, inside=not box.cuda_handle).check()
    memory = SharedMemory.attach(layout.memory, file)
    if not box.cuda_handle:
        return HostMailbox(layout, memory, Side.DRAFT) if device.type == "cpu" else None
    if len(box.cuda_handle) != HANDLE_BYTES:
        raise ProtocolError(
            f"A CUDA IPC handle has the wrong size: {len(box.cuda_handle)} bytes.", field="cuda_handle"
        )
    try:
        slots = PeerMemory(box.cuda_handle, device)
        return StreamMailbox(layout, memory, slots, Side.DRAFT, device)
    except CudaError as error:
        log.warning("rounds go through the host", reason=error.message)
        return None


def acknowledge(
    offer: draft_pb2.MailboxOffer, files: Sequence[int], device: torch.device
) -> tuple[draft_pb2.MailboxAck, Mapped | None]:
    """Return the reply to an offer of mailboxes: the accepted mailboxes, or the reason for refusing them.

    Raises ProtocolError if the offer is malformed.
    """
    try:
        mapped = accept(offer, files, device)
    except CudaError as error:
        return draft_pb2.MailboxAck(reason=error.message), None
    return draft_pb2.MailboxAck(accepted=True, rounds=mapped.blobs is not None), mapped
