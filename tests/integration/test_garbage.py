"""A draft that sends garbage costs only speed. Drafting resumes when its messages are valid again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from mangling_proxy import GARBAGE, ManglingProxy
from support.services.stack import PROMPTS, Stack, TokenCounter, separate

from outrider.common.v1 import common_pb2

MAX_TOKENS = 64
# Six streams: three greedy, three seeded at temperature 1.
STREAMS = [(prompt, float(index % 2), 100 + index) for index, prompt in enumerate(PROMPTS)]
# Total tokens received by the six streams when the draft turns bad. Every kind of garbage is used.
POINTS = [1, 20, 50, 80, 120, 160, 200, 250, 300, 340]
KINDS = [list(GARBAGE)[index % len(GARBAGE)] for index in range(len(POINTS))]


@pytest.fixture(scope="module", params=["unix:", "ipc://"])
def scheme(request: pytest.FixtureRequest) -> str:
    """Scheme of the address at which the target reaches the proxy."""
    return str(request.param)


@pytest.fixture(scope="module")
def proxies(scheme: str) -> list[ManglingProxy]:
    return []


@pytest.fixture(scope="module")
def stack(scheme: str, proxies: list[ManglingProxy]) -> Iterator[Stack]:
    def between(listen: str, upstream: str) -> ManglingProxy:
        proxies.append(ManglingProxy(listen, upstream))
        return proxies[0]

    with separate(scheme=scheme, reach_draft=between) as running:
        running.wait_drafting(30)
        yield running


def run(stack: Stack, mode: int, on_tokens: Callable[[int], None] = lambda count: None) -> list[list[int]]:
    def one(stream: tuple[str, float, int]) -> list[int]:
        prompt, temperature, seed = stream
        return stack.client.chat(
            prompt, mode=mode, max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, on_tokens=on_tokens
        ).token_ids

    with ThreadPoolExecutor(len(STREAMS)) as pool:
        return list(pool.map(one, STREAMS))


@functools.cache
def expected(stack: Stack) -> list[list[int]]:
    return run(stack, common_pb2.SPECULATION_MODE_OFF)


def test_every_kind_of_garbage_has_a_point() -> None:
    assert set(KINDS) == set(GARBAGE)
    assert POINTS[-1] < len(STREAMS) * MAX_TOKENS


@pytest.mark.parametrize(("point", "kind"), list(zip(POINTS, KINDS, strict=True)))
def test_garbage_in_mid_stream_changes_no_token(
    stack: Stack, proxies: list[ManglingProxy], point: int, kind: str
) -> None:
    want = expected(stack)
    stack.wait_drafting(15)
    proxy = proxies[0]
    at_switch: list[tuple[int, int]] = []

    def turn_bad() -> None:
        at_switch.append((proxy.forwarded, proxy.mangled))
        proxy.mangle = GARBAGE[kind]

    before = proxy.forwarded, proxy.mangled
    counter = TokenCounter(point, turn_bad)
    try:
        got = run(stack, common_pb2.SPECULATION_MODE_ON, counter)
    finally:
        proxy.mangle = None
    assert got == want, f"{kind} after {point} tokens"
    ((good, mangled),) = at_switch
    assert mangled == before[1], "garbage was sent too early"
    assert proxy.mangled > mangled, "no garbage was sent"
    # Prefills emit the first token of each stream. Later tokens come from rounds, which had a good draft.
    if point > len(STREAMS):
        assert good > before[0], "the draft was not good before"
    stack.wait_drafting(15)
    stack.assert_no_page_held()


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_from_the_start_changes_no_token_under_the_controller(
    stack: Stack, proxies: list[ManglingProxy], kind: str
) -> None:
    want = expected(stack)
    proxy = proxies[0]
    proxy.mangle = GARBAGE[kind]
    try:
        got = run(stack, common_pb2.SPECULATION_MODE_AUTO)
    finally:
        proxy.mangle = None
    assert got == want
    stack.wait_drafting(15)
    stack.assert_no_page_held()
