"""Tests of mailboxes on one GPU and on two GPUs: another process writes, and the test process reads.

A writer that is killed must not leave a waiting stream behind.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.cuda import CudaError, DeviceMemory, PeerMemory
from outrider.shared.rpc.ipc.deferred_release import DEFERRED_RELEASE
from outrider.shared.rpc.ipc.frames import EndOfStream, FrameKind, FrameSocket
from outrider.shared.rpc.ipc.handshake import Mapped, acknowledge

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

COLUMNS = 4096
ROUNDS = 200
TIMEOUT_S = 120.0
# (writer's GPU, reader's GPU): all pairs of the first two GPUs where the second can access the first.
PAIRS = [
    (theirs, ours)
    for theirs, ours in itertools.product(range(min(2, torch.cuda.device_count())), repeat=2)
    if theirs == ours or torch.cuda.can_device_access_peer(ours, theirs)
]

WRITER = """
import socket, sys
import torch
from outrider.draft.v1 import draft_pb2
from outrider.shared.rpc.ipc.frames import FrameKind, FrameSocket
from outrider.shared.rpc.ipc.handshake import offers

frames = FrameSocket(socket.socket(fileno=int(sys.argv[1])))
device = torch.device("cuda", int(sys.argv[2]))
offered = offers(device)[0]()
frames.send(FrameKind.MAILBOX, offered.offer.SerializeToString(), offered.files)
number = 0
while (received := frames.receive(120.0)) is not None:
    count, bulk = (int(word) for word in received[1].split())
    # A long matrix product first: the rows are not there when the copy is enqueued.
    busy = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(4):
        busy = busy @ busy * 1e-3
    rows = torch.arange(count * 4096, device=device, dtype=torch.float32).view(count, 4096)
    rows.add_(number).add_(busy[0, 0].float() * 0)
    rows = rows.remainder_(251).to(torch.bfloat16)
    writer = offered.bulk if bulk else offered.session
    message = writer.write([rows[: count // 2], rows[count // 2 :]] if count > 1 else [rows])
    rows.zero_()
    frames.send(FrameKind.SESSION, message.SerializeToString())
    number += 1
"""


def expected(count: int, number: int) -> torch.Tensor:
    return (
        torch.arange(count * COLUMNS, dtype=torch.float32)
        .view(count, COLUMNS)
        .add_(number)
        .remainder_(251)
        .to(torch.bfloat16)
    )


@dataclass
class Writer:
    """The other process, and this process's end of its connection."""

    process: subprocess.Popen[bytes]
    frames: FrameSocket
    mapped: Mapped
    device: torch.device

    def ask(self, count: int, *, bulk: bool = False) -> common_pb2.TensorData:
        self.frames.send(FrameKind.SESSION, f"{count} {int(bulk)}".encode())
        received = self.frames.receive(TIMEOUT_S)
        assert received is not None, "the writer did not answer"
        return common_pb2.TensorData.FromString(received[1])


@pytest.fixture(params=PAIRS, ids=str)
def writer(request: pytest.FixtureRequest) -> Iterator[Writer]:
    theirs, ours = request.param
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here.setblocking(False)
    there.setblocking(False)
    command = [sys.executable, "-c", WRITER, str(there.fileno()), str(theirs)]
    with subprocess.Popen(command, pass_fds=[there.fileno()]) as process:
        there.close()
        frames = FrameSocket(here)
        try:
            received = frames.receive(TIMEOUT_S)
            assert received is not None, "the writer made no offer"
            device = torch.device("cuda", ours)
            answer, mapped = acknowledge(
                draft_pb2.MailboxOffer.FromString(received[1]), frames.take_files(2), device
            )
            assert answer.accepted, answer.reason
            assert mapped is not None
            yield Writer(process, frames, mapped, device)
            mapped.session.close()
            mapped.bulk.close()
        finally:
            frames.close()
            process.kill()


def test_rows_arrive_as_they_were(writer: Writer) -> None:
    """Sends more rounds than slots, of changing sizes.

    Each is written while the GPU is busy and then overwritten.
    """
    kept = []
    for number in range(ROUNDS):
        count = 1 + number % 7
        data = writer.ask(count, bulk=number % 5 == 0)
        assert data.WhichOneof("data") == "cuda_ipc"
        reader = writer.mapped.bulk if number % 5 == 0 else writer.mapped.session
        kept.append((reader.read(data, "rows", COLUMNS), count, number))
    for rows, count, number in kept:
        assert rows.device == writer.device
        assert torch.equal(rows.cpu(), expected(count, number))


def test_what_finds_no_slot_travels_inline(writer: Writer) -> None:
    unread = [writer.ask(2) for _ in range(6)]
    kinds = [data.WhichOneof("data") for data in unread]
    assert kinds == ["cuda_ipc"] * 4 + ["inline"] * 2
    for number, data in enumerate(unread):
        rows = writer.mapped.session.read(data, "rows", COLUMNS)
        assert rows.device == writer.device
        assert torch.equal(rows.cpu(), expected(2, number))
    torch.cuda.synchronize(writer.device)
    writer.mapped.session.read(writer.ask(2), "rows", COLUMNS)
    assert writer.ask(2).WhichOneof("data") == "cuda_ipc", "the slots must be free again"


def test_too_many_rows_for_a_slot_travel_inline(writer: Writer) -> None:
    data = writer.ask(600)
    assert data.WhichOneof("data") == "inline"
    assert torch.equal(writer.mapped.session.read(data, "rows", COLUMNS).cpu(), expected(600, 0))


@pytest.mark.parametrize(
    "change", [{"slot": 4}, {"slot": 1 << 31}, {"generation": 2}, {"generation": 0}, {"num_bytes": 1 << 40}]
)
def test_a_message_that_names_something_else_is_refused(writer: Writer, change: dict[str, int]) -> None:
    true = writer.ask(2)
    data = common_pb2.TensorData()
    data.CopyFrom(true)
    for name, value in change.items():
        setattr(data.cuda_ipc, name, value)
    with pytest.raises(ProtocolError):
        writer.mapped.session.read(data, "rows", COLUMNS)
    assert torch.equal(writer.mapped.session.read(true, "rows", COLUMNS).cpu(), expected(2, 0))


def test_a_writer_that_is_killed_leaves_the_reader_working(writer: Writer) -> None:
    data = writer.ask(3)
    os.kill(writer.process.pid, signal.SIGKILL)
    writer.process.wait()
    # The rows may be anything, but reading must not hang or fault.
    writer.mapped.session.read(data, "rows", COLUMNS)
    torch.cuda.synchronize(writer.device)
    with pytest.raises(EndOfStream):
        writer.frames.receive(TIMEOUT_S)
    assert float(torch.ones(4, device=writer.device).sum()) == 4.0


def test_a_writer_that_is_stopped_keeps_nobody_waiting(writer: Writer) -> None:
    data = writer.ask(3)
    os.kill(writer.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    assert torch.equal(writer.mapped.session.read(data, "rows", COLUMNS).cpu(), expected(3, 0))
    assert writer.frames.receive(0.1) is None
    assert time.monotonic() - started < 5.0


def test_a_handle_of_this_process_or_of_nobody_is_an_error_that_leaves_cuda_working() -> None:
    device = torch.device("cuda", 0)
    memory = DeviceMemory(1 << 20, device)
    with pytest.raises(CudaError):
        PeerMemory(memory.handle(), device)
    with pytest.raises(CudaError):
        PeerMemory(b"\x01" * 64, device)
    assert float(torch.ones(4, device=device).sum()) == 4.0


def test_memory_is_freed_when_its_owner_is_gone_for_a_while() -> None:
    # The block is large, because other test processes on this GPU change the free memory as well.
    size, device = 4 << 30, torch.device("cuda", 0)
    torch.ones(1, device=device)
    before = torch.cuda.mem_get_info(device)[0]
    memory = DeviceMemory(size, device)
    assert torch.cuda.mem_get_info(device)[0] <= before - size // 2
    del memory
    assert torch.cuda.mem_get_info(device)[0] <= before - size // 2, "a peer may still write to this memory"
    given_back = threading.Event()
    DEFERRED_RELEASE.when_gone(threading.Event(), given_back.set)  # Runs after the memory is freed.
    assert given_back.wait(TIMEOUT_S)
    assert torch.cuda.mem_get_info(device)[0] >= before - size // 2


def test_the_round_trip_is_short(writer: Writer) -> None:
    """Print the round trip. Its bound is so loose that only a broken path exceeds it."""
    for _ in range(20):
        writer.mapped.session.read(writer.ask(6), "rows", COLUMNS)
    times = []
    for _ in range(100):
        started = time.perf_counter()
        writer.mapped.session.read(writer.ask(6), "rows", COLUMNS)
        torch.cuda.synchronize(writer.device)
        times.append(time.perf_counter() - started)
    times.sort()
    print(
        f"round trip with a matrix product of 4 x 4096: "
        f"p50 {times[50] * 1e6:.0f} us, p90 {times[90] * 1e6:.0f} us"
    )
    assert times[50] < 0.05
