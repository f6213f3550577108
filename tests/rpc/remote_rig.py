"""Runs an engine whose remote drafter follows a scripted draft (`FakeDraft`), and checks its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fake_draft import chain
from support.engine.target_harness import Harness, make_harness

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.remote_drafter import RemoteDrafter
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState

VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]
FAULT_S = 0.3


def truthful(plain: list[int]) -> Callable[[list[int], draft_pb2.Commit], draft_pb2.Tree]:
    """Draft the tokens that the target will choose."""
    answer = PROMPT + plain

    def plan(tokens: list[int], commit: draft_pb2.Commit) -> draft_pb2.Tree:
        count = min(commit.shape.depth, commit.shape.max_nodes - 1)
        return chain(answer[len(tokens) : len(tokens) + count])

    return plan


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Wait until other threads reach a state. Return the time it took."""
    started = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - started < timeout_s, "the state was not reached in time"
        pause.wait(0.005)
    return time.monotonic() - started


def connected(drafter: RemoteDrafter) -> None:
    wait_for(lambda: drafter.state() is DrafterState.ON)


def refused_for(drafter: RemoteDrafter, field: str) -> str:
    """Wait until the target refuses its draft for a field. Return the message."""
    wait_for(lambda: drafter.refusal() is not None)
    refusal = drafter.refusal()
    assert refusal is not None
    assert refusal.field == field
    assert drafter.state() is not DrafterState.ON
    return refusal.message


def start(decoder: Decoder, drafter: RemoteDrafter, count: int = 1, max_new_tokens: int = 60) -> Harness:
    harness = make_harness(decoder, drafter, prefill_chunk=4)
    for index in range(count):
        harness.submit(PROMPT, max_new_tokens, request_id=str(index), shape=(4, 1, 5), trace=True)
    return harness


def check_done(harness: Harness, plain: list[int], count: int = 1, max_new_tokens: int = 60) -> None:
    for index in range(count):
        assert harness.sink.tokens[str(index)] == plain[:max_new_tokens]
    harness.check_idle()
