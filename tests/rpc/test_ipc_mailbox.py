"""Mailboxes in shared memory: exact rows, slots reused only after release, misbehaving peers detected."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections import deque
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport.ipc_carrier import IpcCarrier
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.address import IpcAddress
from outrider.shared.rpc.ipc import cuda_mailbox
from outrider.shared.rpc.ipc.cuda import PeerMemory
from outrider.shared.rpc.ipc.cuda_mailbox import CudaTensorReader
from outrider.shared.rpc.ipc.frames import EndOfStream, FrameSocket
from outrider.shared.rpc.ipc.handshake import accept, acknowledge, offers
from outrider.shared.rpc.ipc.mailbox import SharedTensorReader, SharedTensorWriter
from outrider.shared.rpc.ipc.slots import RELEASED, WRITTEN, SharedMemory, SlotLayout, SlotReader, SlotWriter
from outrider.shared.rpc.tensors import InlineTensors

CPU = torch.device("cpu")
COLUMNS = 8
Ends = tuple[SharedTensorWriter, SharedTensorReader, SharedMemory]


def make_ends(slots: int = 3, rows: int = 4) -> Ends:
    """Return both ends, each with its own mapping as in two processes, and the reader's memory."""
    layout = SlotLayout(slots, rows * COLUMNS * 4)
    written, file = SharedMemory.create(layout)
    read = SharedMemory.attach(layout, file)
    os.close(file)
    return SharedTensorWriter(written), SharedTensorReader(read, CPU), read


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.one_of(st.integers(1, 6), st.none()), max_size=60),
    slots=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_arrive_in_order_through_slots_or_inline(
    steps: list[int | None], slots: int, dtype: torch.dtype
) -> None:
    """A number writes that many rows; None reads one message.

    More than `slots` unread messages travel inline.
    """
    writer, reader, _ = make_ends(slots)
    waiting: deque[tuple[common_pb2.TensorData, torch.Tensor]] = deque()
    unread_slots = 0
    for step, count in enumerate(steps):
        if count is not None:
            sent = rows(count, step, dtype)
            cut = count // 2
            data = writer.write([sent] if not cut else [sent[:cut], sent[cut:]])
            fits = count * COLUMNS * dtype.itemsize <= 4 * COLUMNS * 4 and unread_slots < slots
            assert data.WhichOneof("data") == ("shared_memory" if fits else "inline")
            unread_slots += fits
            waiting.append((data, sent.clone()))
            sent.zero_()
        elif waiting:
            data, expected = waiting.popleft()
            unread_slots -= data.HasField("shared_memory")
            got = reader.read(data, "rows", COLUMNS)
            assert got.dtype == dtype
            assert torch.equal(got, expected)


def test_rows_that_were_read_do_not_change_with_the_slot() -> None:
    writer, reader, _ = make_ends(slots=1)
    first = reader.read(writer.write([rows(2, 1)]), "rows", COLUMNS)
    second = reader.read(writer.write([rows(2, 2)]), "rows", COLUMNS)
    assert torch.equal(first, rows(2, 1))
    assert torch.equal(second, rows(2, 2))


def changed(data: common_pb2.TensorData, **fields: int) -> common_pb2.TensorData:
    copy = common_pb2.TensorData()
    copy.CopyFrom(data)
    for name, value in fields.items():
        setattr(copy.shared_memory, name, value)
    return copy


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slot": 3}, "slot"),
        ({"slot": 1 << 31}, "slot"),
        ({"generation": 0}, "generation"),
        ({"generation": 2}, "generation"),
        ({"generation": (1 << 64) - 1}, "generation"),
        ({"num_bytes": 4}, "rows"),
        ({"num_bytes": 1 << 40}, "rows"),
    ],
)
def test_a_message_with_a_wrong_slot_reference_is_refused(fields: dict[str, int], named: str) -> None:
    writer, reader, _ = make_ends()
    data = writer.write([rows(2)])
    with pytest.raises(ProtocolError) as error:
        reader.read(changed(data, **fields), "rows", COLUMNS)
    assert error.value.field == named
    assert torch.equal(reader.read(data, "rows", COLUMNS), rows(2)), "the correct message is still accepted"


def test_more_rows_than_a_slot_holds_are_refused() -> None:
    _, reader, memory = make_ends(rows=4)
    memory.set_counter(0, WRITTEN, 1)
    num_bytes = 5 * COLUMNS * 4
    where = common_pb2.SharedSlot(slot=0, generation=1, num_bytes=num_bytes)
    data = common_pb2.TensorData(shape=(5, COLUMNS), dtype=common_pb2.DATA_TYPE_FLOAT32, shared_memory=where)
    with pytest.raises(ProtocolError, match="in a slot of"):
        reader.read(data, "rows", COLUMNS)


def test_a_message_is_read_once() -> None:
    writer, reader, _ = make_ends()
    data = writer.write([rows(2)])
    reader.read(data, "rows", COLUMNS)
    with pytest.raises(ProtocolError, match="generation 1"):
        reader.read(data, "rows", COLUMNS)


def test_other_widths_and_types_are_refused() -> None:
    writer, reader, _ = make_ends()
    with pytest.raises(ProtocolError, match=r"expected shape \[rows, 9\]"):
        reader.read(writer.write([rows(2)]), "rows", COLUMNS + 1)
    data = writer.write([rows(2)])
    data.dtype = 77  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="unknown data type"):
        reader.read(data, "rows", COLUMNS)
    with pytest.raises(ProtocolError, match="only inline tensors"):
        InlineTensors().read(writer.write([rows(2)]), "rows", COLUMNS)


@settings(max_examples=60, deadline=None)
@given(
    nonsense=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([WRITTEN, RELEASED]), st.integers(0, (1 << 64) - 1)),
        max_size=20,
    )
)
def test_invalid_counters_break_neither_side(nonsense: list[tuple[int, int, int]]) -> None:
    writer, reader, memory = make_ends()
    for step, (slot, which, value) in enumerate(nonsense):
        memory.set_counter(slot, which, value)
        sent = rows(2, step)
        with contextlib.suppress(ProtocolError):
            data = writer.write([sent])
            assert torch.equal(reader.read(data, "rows", COLUMNS), sent)


def test_overwriting_a_slot_during_its_read_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader, memory = make_ends()
    data = writer.write([rows(2)])
    clone = torch.Tensor.clone

    def overtaken(tensor: torch.Tensor) -> torch.Tensor:
        memory.set_counter(0, WRITTEN, 2)
        return clone(tensor)

    monkeypatch.setattr(torch.Tensor, "clone", overtaken)
    with pytest.raises(ProtocolError, match="was overwritten"):
        reader.read(data, "rows", COLUMNS)


@pytest.mark.parametrize("nonsense", [3, 99_999, (1 << 64) - 1])
def test_a_slot_that_could_never_become_free_is_an_error(nonsense: int) -> None:
    """Otherwise rows would wait forever for a free slot, on a connection that seems healthy."""
    writer, reader, memory = make_ends(slots=2)
    reader.read(writer.write([rows(2)]), "rows", COLUMNS)
    unread = [writer.write([rows(2)]) for _ in range(2)]
    assert writer.offer(rows(2)) is None, "slots that are still unread are no error"
    for slot in (0, 1):
        memory.set_counter(slot, RELEASED, nonsense)
    with pytest.raises(ProtocolError, match="the peer released generation"):
        writer.offer(rows(2))
    with pytest.raises(ProtocolError, match="the peer released generation"):
        writer.write([rows(2)])
    assert torch.equal(reader.read(unread[0], "rows", COLUMNS), rows(2))


class Event:
    """The event of a copy; done when the test sets it."""

    done = False

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return Event.done


@pytest.mark.parametrize("wait", [True, False], ids=["waited for", "beside"])
def test_overwriting_a_gpu_slot_during_its_copy_is_detected(
    monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """Uses the reader's own code on the host: copies run immediately but are reported as done later."""
    layout = SlotLayout(2, 64, slots_inside=False)
    ledger, file = SharedMemory.create(layout)
    os.close(file)
    slots = torch.arange(32, dtype=torch.float32)
    overtaken = False

    def copy(there: int, source: int, num_bytes: int, device: torch.device) -> None:
        ctypes.memmove(there, source, num_bytes)
        if overtaken:
            ledger.set_counter(1, WRITTEN, 2)

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(cuda_mailbox, "copy_async", copy)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(Event, "done", False)
    memory = cast("PeerMemory", SimpleNamespace(pointer=slots.data_ptr()))
    reader = CudaTensorReader(ledger, memory, CPU, wait=wait)
    writer = SlotWriter(ledger)

    def message(columns: int) -> common_pb2.TensorData:
        slot = writer.take()
        assert slot is not None
        where = common_pb2.SharedSlot(slot=slot, generation=writer.publish(slot), num_bytes=columns * 4)
        return common_pb2.TensorData(shape=(1, columns), dtype=common_pb2.DATA_TYPE_FLOAT32, cuda_ipc=where)

    assert torch.equal(reader.read(message(4), "rows", 4), slots[:4].view(1, 4))
    assert ledger.counter(0, RELEASED) == wait, (
        "without waiting, the slot is released only when the copy is done"
    )
    overtaken = True
    if wait:
        with pytest.raises(ProtocolError, match="was overwritten"):
            reader.read(message(4), "rows", 4)
    else:
        reader.read(message(4), "rows", 4)
        Event.done = True
        with pytest.raises(ProtocolError, match="was overwritten"):
            reader.read(common_pb2.TensorData(), "rows", 4)
        assert ledger.counter(0, RELEASED) == 1
    assert ledger.counter(1, RELEASED) == 0, "the slot is not released"


def test_the_ledger_reuses_slots_in_turn() -> None:
    layout = SlotLayout(2, 64, slots_inside=False)
    memory, file = SharedMemory.create(layout)
    os.close(file)
    writer, reader = SlotWriter(memory), SlotReader(memory)
    for generation in range(1, 5):
        for slot in (0, 1):
            assert writer.take() == slot
            assert writer.publish(slot) == generation
        assert writer.take() is None
        for slot in (0, 1):
            reader.check(slot, generation, 64)
            reader.release(slot, generation)


def test_unsealed_memory_or_memory_of_another_size_is_refused() -> None:
    layout = SlotLayout(2, 4096)
    file = os.memfd_create("plain")
    os.ftruncate(file, layout.total_bytes)
    with pytest.raises(ProtocolError, match="sealed memory"):
        SharedMemory.attach(layout, file)
    os.close(file)
    _memory, file = SharedMemory.create(layout)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    with pytest.raises(ProtocolError, match="announced size"):
        SharedMemory.attach(SlotLayout(3, 4096), file)
    os.close(file)
    read, write = os.pipe()
    with pytest.raises(ProtocolError):
        SharedMemory.attach(layout, read)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    "layout", [SlotLayout(0, 64), SlotLayout(65, 64), SlotLayout(1, 0), SlotLayout(1, 1 << 40)]
)
def test_sizes_outside_the_limits_are_refused(layout: SlotLayout) -> None:
    with pytest.raises(ProtocolError, match="outside the limits"):
        layout.check()


def test_an_offer_is_mapped_and_its_descriptors_closed() -> None:
    (offer,) = offers(CPU)
    offered = offer()
    mapped = accept(offered.offer, [os.dup(file) for file in offered.files], CPU)
    offered.sent()
    for writer, reader in ((offered.session, mapped.session), (offered.bulk, mapped.bulk)):
        data = writer.write([rows(3)])
        assert data.HasField("shared_memory")
        assert torch.equal(reader.read(data, "rows", COLUMNS), rows(3))


def test_device_memory_is_refused_by_a_draft_on_the_cpu() -> None:
    layout = SlotLayout(1, 64, slots_inside=False)
    files = []
    for _ in range(2):
        _memory, file = SharedMemory.create(layout)
        files.append(file)
    box = draft_pb2.Mailbox(slots=1, slot_bytes=64, cuda_handle=b"x" * 64)
    answer, mapped = acknowledge(draft_pb2.MailboxOffer(session=box, bulk=box), files, CPU)
    assert mapped is None
    assert not answer.accepted
    assert "CPU" in answer.reason
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files[0])


def test_an_interrupted_handshake_leaks_no_descriptor() -> None:
    carrier = IpcCarrier(IpcAddress("/nobody"), CPU, on_device=True)
    try:
        kept = []
        for _ in range(3):
            mine, theirs = socket.socketpair()
            mine.setblocking(False)
            theirs.close()
            carrier._session = FrameSocket(mine)
            with pytest.raises(EndOfStream):
                carrier._agree(on_device=True)
            carrier._session.close()
            kept.append(len(os.listdir("/proc/self/fd")))
        assert kept[0] == kept[1] == kept[2]
    finally:
        carrier.release()
