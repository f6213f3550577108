"""Tests of rounds that wait in a GPU stream until the host of this process writes a word.

No wait exceeds its time limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.deferred_release import DEFERRED_RELEASE
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.relay import LAYOUT, LEAST_STATE_BYTES, StreamRelay

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

IN_BYTES, OUT_BYTES = 49_408, 1024
LIMIT_S = 30.0
LATENESS_S = 0.5
"""Tolerance of a limit. A watch polls every 2 ms, but a busy machine may be later."""


class Half:
    """One side's part of a round: sends the received blob plus one."""

    def __init__(self, side: Side) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.side = side
        self.relay = StreamRelay(side, device)
        self.came = torch.zeros(IN_BYTES, dtype=torch.uint8, device=device)
        self.goes = torch.zeros(OUT_BYTES, dtype=torch.uint8, device=device)
        self.expected = torch.zeros(1, dtype=torch.int32, device=device)
        self._work()  # Loading kernels waits for the device, so load them before the first wait.
        torch.cuda.synchronize()

    def enqueue(self, number: int, limit_s: float = LIMIT_S) -> None:
        self.relay.take(number, self.came, self.expected, limit_s)
        self._work()
        self.relay.give(number, self.goes)

    def _work(self) -> None:
        self.goes[4:].copy_(self.came[4:OUT_BYTES] + 1)


@pytest.fixture(params=Side, ids=lambda side: str(side.value))
def half(request: pytest.FixtureRequest) -> Iterator[Half]:
    half = Half(request.param)
    yield half
    half.relay.close()
    torch.cuda.synchronize()


def test_a_round_runs_when_the_host_puts_what_it_waits_for(half: Half) -> None:
    for number in range(1, 12):
        half.enqueue(number)
        time.sleep(0.002)  # Without the wait, the round would have run by now.
        assert not half.relay._given[number % 2].query(), "the round must wait"
        half.relay.put(number, bytes([number]) * IN_BYTES)
        trees = half.relay.settle(number, OUT_BYTES)
        assert set(trees[4:].tolist()) == {number + 1}
        assert trees[:4].view("int32").item() == number
        assert half.came[:4].view(torch.int32).item() == half.expected.item() == number
    assert not half.relay.broken


def test_a_call_runs_beside_a_stream_that_waits(half: Half) -> None:
    half.enqueue(1)
    half.relay.call()
    half.relay._aside.synchronize()
    assert not half.relay.given(1)
    half.relay.put(1, bytes(IN_BYTES))
    half.relay.settle(1, OUT_BYTES)
    assert half.relay.given(1)


@pytest.mark.parametrize("how", ["limit", "release", "close"])
def test_a_wait_ends_without_what_it_is_for(half: Half, how: str) -> None:
    began = time.monotonic()
    half.relay.give(2, half.goes)  # The target's limit counts from here.
    half.enqueue(2, 0.1 if how == "limit" else LIMIT_S)
    if how == "release":
        half.relay.release(2)
    elif how == "close":
        half.relay.close()
    half.relay.settle(2, OUT_BYTES)
    torch.cuda.synchronize()
    assert time.monotonic() - began < 0.1 + LATENESS_S
    assert half.came[:4].view(torch.int32).item() != half.expected.item() == 2, (
        "the blob must not count for this round"
    )
    assert half.relay.broken == (how != "release")
    assert half.relay.mend()
    if how != "close":
        half.enqueue(3)
        half.relay.put(3, bytes(IN_BYTES))
        half.relay.settle(3, OUT_BYTES)
        assert half.came[:4].view(torch.int32).item() == 3


def test_a_state_may_lack_its_end_and_trees_may_not(half: Half) -> None:
    half.enqueue(1)
    short = bytes([9]) * (IN_BYTES // 2)
    if half.side is Side.TARGET:
        with pytest.raises(ProtocolError):
            half.relay.put(1, short)
        half.relay.release(1)
        return
    half.relay.put(1, short)
    assert set(half.relay.settle(1, OUT_BYTES)[4:].tolist()) == {10}


def test_blobs_of_another_round_or_size_are_refused(half: Half) -> None:
    half.enqueue(1)
    for number, size in ((1, IN_BYTES + 1), (1, LEAST_STATE_BYTES - 1), (1, 0), (3, IN_BYTES)):
        with pytest.raises(ProtocolError):
            half.relay.put(number, bytes(size))
    half.relay.put(1, bytes(IN_BYTES))
    half.relay.settle(1, OUT_BYTES)


def test_what_fits() -> None:
    relay = StreamRelay.try_make(Side.TARGET, torch.device("cuda", torch.cuda.current_device()))
    assert relay is not None
    trees = torch.zeros(OUT_BYTES, dtype=torch.uint8)
    assert relay.fits(torch.zeros(LAYOUT.state_bytes, dtype=torch.uint8), trees)
    assert not relay.fits(torch.zeros(LAYOUT.state_bytes + 1, dtype=torch.uint8), trees)
    assert StreamRelay.try_make(Side.TARGET, torch.device("cpu")) is None


def test_a_thread_that_has_asked_the_device_for_nothing_yet_may_enqueue(half: Half) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(half.enqueue, 1).result(LIMIT_S)
    half.relay.put(1, bytes([1]) * IN_BYTES)
    assert set(half.relay.settle(1, OUT_BYTES)[4:].tolist()) == {2}


def test_a_relay_that_goes_keeps_no_thread_waiting(half: Half) -> None:
    """This happens after a reconnect while the stream already waits for the new connection."""
    old = Half(half.side)
    old.enqueue(1)
    old.relay.put(1, bytes(IN_BYTES))
    old.relay.settle(1, OUT_BYTES)
    half.enqueue(1)
    began = time.monotonic()
    old.relay.close()
    del old
    pause = threading.Event()
    while time.monotonic() < began + 0.2:  # Time in which a wrong disposal would run.
        half.relay.call()
        pause.wait(0.01)
    assert time.monotonic() - began < 0.2 + LATENESS_S
    assert not half.relay.given(1), "the stream must still wait"
    half.relay.put(1, bytes([1]) * IN_BYTES)
    assert set(half.relay.settle(1, OUT_BYTES)[4:].tolist()) == {2}
    assert disposed()


def test_connections_come_and_go_while_a_graph_is_recorded(half: Half) -> None:
    numbers = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as thread:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            numbers.add_(1)
            thread.submit(come_and_go, half.side).result(LIMIT_S)
            numbers.mul_(2)
        graph.replay()
        assert numbers.unique().tolist() == [2.0]


def come_and_go(side: Side) -> None:
    relay = StreamRelay(side, torch.device("cuda", torch.cuda.current_device()))
    relay.call()
    relay.close()
    del relay
    assert disposed()


def disposed() -> bool:
    """Return True if everything closed has been freed."""
    done = threading.Event()
    DEFERRED_RELEASE.when_gone(threading.Event(), done.set)
    return done.wait(LIMIT_S)
