"""Tests of rounds between the streams of two processes.

Blobs arrive in stream order. Every wait ends, even if the peer dies, stops or is late.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from check_cases import check_tree_check
from guards import Guards
from trade_cases import check_admit_counts, check_blobs, check_pack_trees

from outrider.draft.v1 import draft_pb2
from outrider.shared.rpc.ipc.blob_mailbox import BlobMailbox
from outrider.shared.rpc.ipc.frames import EndOfStream, FrameKind, FrameSocket
from outrider.shared.rpc.ipc.handshake import offers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TIMEOUT_S = 120.0
STATE_BYTES, TREES_BYTES = 65536, 8192
# (target's GPU, draft's GPU): all pairs of the first two GPUs where the second can access the first.
PAIRS = [
    (ours, theirs)
    for ours, theirs in itertools.product(range(min(2, torch.cuda.device_count())), repeat=2)
    if ours == theirs or torch.cuda.can_device_access_peer(theirs, ours)
]

DRAFT = """
import socket, sys
import torch
from outrider.draft.v1 import draft_pb2
from outrider.shared.rpc.ipc.frames import FrameKind, FrameSocket
from outrider.shared.rpc.ipc.handshake import acknowledge

frames = FrameSocket(socket.socket(fileno=int(sys.argv[1])))
device = torch.device("cuda", int(sys.argv[2]))
torch.cuda.set_device(device)
_kind, payload = frames.receive(120.0)
offer = draft_pb2.MailboxOffer.FromString(payload)
answer, mapped = acknowledge(offer, frames.take_files(3), device)
frames.send(FrameKind.MAILBOX, answer.SerializeToString())
mailbox = mapped.blobs
state = torch.zeros(65536, dtype=torch.uint8, device=device)
trees = torch.zeros(8192, dtype=torch.uint8, device=device)
expected = torch.zeros(1, dtype=torch.int32, device=device)
def draft():
    busy = torch.randn(2048, 2048, device=device)
    busy = busy @ busy
    body = state[256 : 256 + 8192 - 256].view(torch.int32)
    trees[256:].view(torch.int32).copy_(body + 1 + (busy[0, 0] * 0).int())

draft()  # Loading kernels waits for the device, so load them before the first wait for a state.
torch.cuda.synchronize()
while (received := frames.receive(120.0)) is not None:
    command, number = received[1].decode().split()
    if command == "close":
        mailbox.close()
        torch.cuda.synchronize()
        frames.send(FrameKind.SESSION, str(int(state[:4].view(torch.int32))).encode())
        continue
    mailbox.receive(int(number), state, expected, float(command))
    draft()
    mailbox.send(int(number), trees)
"""


@dataclass
class Draft:
    """The other process, and this process's end of its connection."""

    process: subprocess.Popen[bytes]
    frames: FrameSocket
    mailbox: BlobMailbox
    device: torch.device

    def __post_init__(self) -> None:
        self.state = torch.zeros(STATE_BYTES, dtype=torch.uint8, device=self.device)
        self.trees = torch.zeros(TREES_BYTES, dtype=torch.uint8, device=self.device)
        self.expected = torch.zeros(1, dtype=torch.int32, device=self.device)

    def tell(self, number: int, limit_s: float = 60.0) -> None:
        """Make it enqueue its part of a round."""
        self.frames.send(FrameKind.SESSION, f"{limit_s} {number}".encode())

    def round(self, number: int, limit_s: float = 60.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Enqueue this side's part. Return the received blob, and whether it belongs to this round."""
        self.state[256:].view(torch.int32).fill_(number * 10)
        self.mailbox.send(number, self.state)
        self.mailbox.receive(number, self.trees, self.expected, limit_s)
        return self.trees[256:].view(torch.int32).clone(), self.trees[:4].view(torch.int32) == self.expected


@pytest.fixture(params=PAIRS, ids=str)
def draft(request: pytest.FixtureRequest) -> Iterator[Draft]:
    ours, theirs = request.param
    device = torch.device("cuda", ours)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    here.setblocking(False)
    there.setblocking(False)
    command = [sys.executable, "-c", DRAFT, str(there.fileno()), str(theirs)]
    with torch.cuda.device(device), subprocess.Popen(command, pass_fds=[there.fileno()]) as process:
        there.close()
        frames = FrameSocket(here)
        try:
            offered = offers(device, blobs=True)[0]()
            frames.send(FrameKind.MAILBOX, offered.offer.SerializeToString(), offered.files)
            offered.sent()
            received = frames.receive(TIMEOUT_S)
            assert received is not None, "the draft did not answer"
            answer = draft_pb2.MailboxAck.FromString(received[1])
            assert answer.accepted, answer.reason
            assert answer.rounds
            assert offered.blobs is not None
            yield Draft(process, frames, offered.blobs, device)
            offered.blobs.close()
            torch.cuda.synchronize(device)
        finally:
            frames.close()
            process.kill()


def test_rounds_that_are_enqueued_ahead_arrive_in_order(draft: Draft) -> None:
    came = []
    for number in range(1, 101):
        draft.tell(number)
        came.append((number, *draft.round(number)))
    torch.cuda.synchronize(draft.device)
    for number, trees, of_this_round in came:
        assert bool(of_this_round)
        assert trees.unique().tolist() == [number * 10 + 1]
    assert not draft.mailbox.broken
    assert draft.mailbox.mend()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone_or_stopped_is_waited_for_no_longer_than_the_limit(
    draft: Draft, number: signal.Signals
) -> None:
    draft.tell(1)
    assert bool(draft.round(1)[1])
    os.kill(draft.process.pid, number)
    started = time.monotonic()
    with contextlib.suppress(EndOfStream):  # The system may have closed the dead peer's socket already.
        draft.tell(2)
    _trees, of_this_round = draft.round(2, limit_s=0.3)
    assert not bool(of_this_round), "the blob must not count for this round"
    assert 0.25 < time.monotonic() - started < 5.0
    assert draft.mailbox.broken
    assert float(torch.ones(4, device=draft.device).sum()) == 4.0
    if number is signal.SIGSTOP:  # A peer that was only late is used again.
        os.kill(draft.process.pid, signal.SIGCONT)
        assert draft.mailbox.mend()
        draft.tell(3)
        trees, of_this_round = draft.round(3)
        assert bool(of_this_round)
        assert trees.unique().tolist() == [31]


def test_the_end_of_the_connection_ends_the_wait(draft: Draft) -> None:
    _trees, of_this_round = draft.round(1)
    draft.mailbox.close()
    started = time.monotonic()
    torch.cuda.synchronize(draft.device)
    assert time.monotonic() - started < 5.0
    assert not bool(of_this_round)
    assert not bool(draft.round(2)[1]), "later rounds must not wait"


@pytest.mark.parametrize("limit_s", [0.3, 60.0])
def test_a_draft_is_released_from_a_target_that_is_gone(draft: Draft, limit_s: float) -> None:
    """Either its watch or the closed connection releases it."""
    draft.tell(1, limit_s)  # No state follows.
    draft.frames.send(FrameKind.SESSION, b"close 0")
    received = draft.frames.receive(20.0)
    assert received is not None, "the draft hangs"
    assert received[1] == b"0"


def test_the_round_trip_is_short(draft: Draft) -> None:
    """Print the round trip. Its bound is so loose that only a broken path exceeds it."""
    times = []
    for number in range(1, 60):
        draft.tell(number)
        started = time.perf_counter()
        draft.round(number)
        torch.cuda.synchronize(draft.device)
        times.append(time.perf_counter() - started)
    times.sort()
    print(
        f"round trip with a matrix product of 2048^3: "
        f"p50 {times[30] * 1e6:.0f} us, p90 {times[54] * 1e6:.0f} us"
    )
    assert times[30] < 0.05


@pytest.mark.parametrize(
    ("bs", "columns", "depth"), [(1, 32, 5), (64, 32, 5), (9, 6, 5), (8, 33, 4), (5, 70, 16), (4, 1, 3)]
)
@pytest.mark.parametrize("number", [7, 6])
def test_tree_check(bs: int, columns: int, depth: int, number: int) -> None:
    check_tree_check("cuda", bs, columns, depth, Guards(67), number=number)


@pytest.mark.parametrize("num_bytes", [4, 256, 8196, 50_004])
def test_blobs_travel_through_a_slot(num_bytes: int) -> None:
    check_blobs("cuda", num_bytes, Guards(64))


@pytest.mark.parametrize(("number", "expected"), [(7, 7), (6, 7)])
def test_a_state_counts_in_its_own_round_only(number: int, expected: int) -> None:
    check_admit_counts("cuda", 33, number, expected, Guards(67))


@pytest.mark.parametrize(("bs", "columns"), [(1, 32), (3, 33)])
def test_trees_are_packed_whole(bs: int, columns: int) -> None:
    check_pack_trees("cuda", bs, columns, Guards(67))
