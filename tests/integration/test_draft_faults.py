"""The draft is disposable: every stream keeps its tokens if the draft is killed or suspended mid-stream."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from grpc_health.v1 import health_pb2
from support.gateway_client import Result
from support.stack import PROMPTS, Stack, TokenCounter, child_pid, health_changes

from outrider.common.v1 import common_pb2

MAX_TOKENS = 64
# Six streams: three greedy, three seeded at temperature 1.
STREAMS = [(prompt, 0.0 if index % 2 == 0 else 1.0, 100 + index) for index, prompt in enumerate(PROMPTS)]
POINTS = [1, 20, 50, 80, 120, 160, 200, 250, 300, 350]


@pytest.fixture
def points(transport: str) -> list[int]:
    """Token counts at which the draft is killed or suspended.

    Shared memory uses every second point, because a restart takes the same path there.
    """
    return POINTS if transport == "grpc" else POINTS[::2]


@pytest.fixture(scope="module")
def expected(stack: Stack) -> list[list[int]]:
    """Tokens that the target generates without speculation."""
    return [result.token_ids for result in run_streams(stack, mode=common_pb2.SPECULATION_MODE_OFF)]


def run_streams(stack: Stack, *, mode: int, counter: TokenCounter | None = None) -> list[Result]:
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


def wait_serving(address: str) -> float:
    """Block until the draft reports SERVING, and return the monotonic time."""
    for status in health_changes(address):
        if status == health_pb2.HealthCheckResponse.SERVING:
            return time.monotonic()
    raise AssertionError("the health watch ended")


def test_streams_draft_when_nothing_is_wrong(stack: Stack, expected: list[list[int]]) -> None:
    results = run_streams(stack, mode=common_pb2.SPECULATION_MODE_ON)
    assert [result.token_ids for result in results] == expected
    assert drafted_rounds(results) > 0


@pytest.mark.timeout(240)
def test_killed_draft_costs_no_token_and_comes_back(
    stack: Stack, expected: list[list[int]], points: list[int]
) -> None:
    slowest = 0.0
    for point in points:
        draft = child_pid(stack.processes[0].popen.pid, "draft")
        counter = TokenCounter(point, partial(os.kill, draft, signal.SIGKILL))
        results = run_streams(stack, mode=common_pb2.SPECULATION_MODE_ON, counter=counter)
        assert counter.acted
        assert [result.token_ids for result in results] == expected, f"killed after {point} tokens"
        serving = wait_serving(stack.draft_address)
        stack.wait_drafting(10)
        slowest = max(slowest, time.monotonic() - serving)
        assert stack.processes[0].output.count("a standby process takes over") == points.index(point) + 1
    print(f"drafting resumed within {slowest:.2f} s of SERVING")
    assert slowest <= 1.0
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
