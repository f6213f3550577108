"""The draft is disposable: every stream keeps its tokens if the draft is killed or suspended mid-stream."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from grpc_health.v1 import health_pb2
from support.services.gateway_client import Result
from support.services.stack import PROMPTS, Stack, TokenCounter, child_pid, health_changes

from outrider.common.v1 import common_pb2
from outrider.services.target.draft_client.breaker import MISSES_TO_OPEN

MAX_TOKENS = 64
# Six streams: three greedy, three seeded at temperature 1.
STREAMS = [(prompt, 0.0 if index % 2 == 0 else 1.0, 100 + index) for index, prompt in enumerate(PROMPTS)]
TOGGLE_TOKENS = 60
"""Tokens of all streams after which the draft is stopped or continued."""
POINTS = [1, 20, 50, 80, 120, 160, 200, 250, 300, 350]


class Flapper:
    """Stops and continues the draft, each time when all streams together have emitted some more tokens.

    Attributes:
        waits: For each stop, the number of rounds that waited for trees while the draft was stopped.
    """

    def __init__(self, stack: Stack, draft: int) -> None:
        self._stack = stack
        self._draft = draft
        self._lock = threading.Lock()
        self._count = self._before = 0
        self._stopped = False
        self.waits: list[int] = []

    def __call__(self, tokens: int) -> None:
        with self._lock:
            self._count += tokens
            if self._count >= TOGGLE_TOKENS:
                self._count = 0
                self.resume() if self._stopped else self._stop()

    def resume(self) -> None:
        """Continue the draft if it is stopped."""
        if self._stopped:
            self.waits.append(measured_waits(self._stack) - self._before)
            os.kill(self._draft, signal.SIGCONT)
            self._stopped = False

    def _stop(self) -> None:
        os.kill(self._draft, signal.SIGSTOP)
        self._before, self._stopped = measured_waits(self._stack), True


def measured_waits(stack: Stack) -> int:
    """Return the number of rounds that have waited for trees, with or without success."""
    text = stack.stats().prometheus_text
    (line,) = [one for one in text.splitlines() if one.startswith("outrider_draft_rpc_seconds_count")]
    return int(float(line.split()[-1]))


@pytest.fixture
def points(transport: str) -> list[int]:
    """Token counts at which the draft is killed or suspended: every second one with each transport."""
    return POINTS[::2] if transport == "grpc" else POINTS[1::2]


@pytest.fixture(scope="module")
def expected(stack: Stack) -> list[list[int]]:
    """Tokens that the target generates without speculation."""
    return [result.token_ids for result in run_streams(stack, mode=common_pb2.SPECULATION_MODE_OFF)]


def run_streams(stack: Stack, *, mode: int, counter: Callable[[int], None] | None = None) -> list[Result]:
    """Run all six streams concurrently."""
    with ThreadPoolExecutor(len(STREAMS)) as pool:
        futures = [
            pool.submit(
                partial(
                    stack.client.chat,
                    mode=mode,
                    max_tokens=MAX_TOKENS,
                    temperature=temperature,
                    seed=seed,
                    trace=True,
                ),
                prompt,
                on_tokens=counter or (lambda count: None),
            )
            for prompt, temperature, seed in STREAMS
        ]
        return [future.result() for future in futures]


def drafted_rounds(results: list[Result]) -> int:
    return sum(len(one.nodes) > 1 for result in results for one in result.rounds)


def wait_serving(address: str) -> None:
    """Block until the draft reports SERVING."""
    for status in health_changes(address):
        if status == health_pb2.HealthCheckResponse.SERVING:
            return
    raise AssertionError("the health watch ended")


def test_streams_draft_when_nothing_is_wrong(stack: Stack, expected: list[list[int]]) -> None:
    results = run_streams(stack, mode=common_pb2.SPECULATION_MODE_ON)
    assert [result.token_ids for result in results] == expected
    assert drafted_rounds(results) > 0


@pytest.mark.timeout(240)
def test_killed_draft_costs_no_token_and_comes_back(
    stack: Stack, expected: list[list[int]], points: list[int]
) -> None:
    for point in points:
        draft = child_pid(stack.processes[0].popen.pid, "draft")
        counter = TokenCounter(point, partial(os.kill, draft, signal.SIGKILL))
        results = run_streams(stack, mode=common_pb2.SPECULATION_MODE_ON, counter=counter)
        assert counter.acted
        assert [result.token_ids for result in results] == expected, f"killed after {point} tokens"
        wait_serving(stack.draft_address)
        print(f"drafting resumed {stack.wait_drafting(10):.2f} s after SERVING")
        output = stack.processes[0].output
        assert output.count("a standby process takes over") == points.index(point) + 1, output
    stack.assert_no_page_held()


@pytest.mark.timeout(240)
def test_stopped_draft_costs_no_token_and_resumes(
    stack: Stack, expected: list[list[int]], points: list[int]
) -> None:
    draft = child_pid(stack.processes[0].popen.pid, "draft")
    for point in points:
        counter = TokenCounter(point, partial(os.kill, draft, signal.SIGSTOP))
        try:
            results = run_streams(stack, mode=common_pb2.SPECULATION_MODE_ON, counter=counter)
        finally:
            os.kill(draft, signal.SIGCONT)
        assert counter.acted
        assert [result.token_ids for result in results] == expected, f"stopped after {point} tokens"
        stack.wait_drafting(5)
    stack.assert_no_page_held()


@pytest.mark.timeout(240)
def test_a_draft_that_stops_again_and_again_holds_up_no_auto_request(
    stack: Stack, expected: list[list[int]]
) -> None:
    """The draft continues only once the streams have emitted tokens without it."""
    flapper = Flapper(stack, child_pid(stack.processes[0].popen.pid, "draft"))
    for _repeat in range(3):
        try:
            results = run_streams(stack, mode=common_pb2.SPECULATION_MODE_AUTO, counter=flapper)
        finally:
            flapper.resume()
        assert [result.token_ids for result in results] == expected
    assert len(flapper.waits) >= 7
    # One wait may have begun before the stop, and one is for the first trees of new requests.
    assert max(flapper.waits) <= MISSES_TO_OPEN + 2, flapper.waits
    stack.wait_drafting(5)
    stack.assert_no_page_held()
