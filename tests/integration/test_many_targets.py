"""Two targets behind one gateway as real processes: SIGKILL, and a rolling restart, under load."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.services.two_targets import STREAMS, Crowd, TwoTargets

CPU = ("--device", "cpu", "--threads", "1")


@pytest.fixture(scope="module")
def two() -> Iterator[TwoTargets]:
    with contextlib.ExitStack() as cleanup:
        yield TwoTargets(cleanup, CPU, CPU)


@pytest.fixture(scope="module")
def undisturbed(two: TwoTargets) -> list[list[int]]:
    return two.answers()


def test_a_rolling_restart_under_load_fails_no_request(two: TwoTargets, undisturbed: list[list[int]]) -> None:
    """Each target gets SIGTERM and starts again while requests run.

    Depending on the speed of the machine, a stream ends while its target drains, or it moves.
    """
    stop = threading.Event()
    served = [0] * 4

    def load(lane: int) -> None:
        index = lane
        while not stop.is_set():
            assert two.answer(index) == undisturbed[index]
            served[lane] += 1
            index = (index + len(served)) % STREAMS

    with ThreadPoolExecutor(len(served)) as pool:
        lanes = [pool.submit(load, lane) for lane in range(len(served))]
        try:
            for index, old in enumerate(two.targets):
                assert old.stop() == 0
                two.targets[index] = two.start_target(index)
                two.wait_ready(2)
        finally:
            stop.set()
        for lane in lanes:
            lane.result(120)
    assert min(served) > 0


def test_every_stream_of_a_killed_target_ends_with_its_tokens(
    two: TwoTargets, undisturbed: list[list[int]]
) -> None:
    before = two.moves()
    with ThreadPoolExecutor(STREAMS) as pool:
        crowd = Crowd(two, pool)
        assert crowd.all_run.wait(60)
        os.kill(two.targets[0].popen.pid, signal.SIGKILL)
        assert crowd.results() == undisturbed
    assert two.moves() > before
