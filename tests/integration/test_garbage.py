"""Promise 3: a draft that answers garbage costs speed only, and drafting is resumed when it comes to its senses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from mangling_proxy import GARBAGE, ManglingProxy
from stack import PROMPTS, Stack, separate

from outrider.common.v1 import common_pb2

STREAMS = [(prompt, float(index % 2), 100 + index) for index, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def proxies() -> list[ManglingProxy]:
    return []


@pytest.fixture(scope="module")
def stack(proxies: list[ManglingProxy]) -> Iterator[Stack]:
    def between(listen: str, upstream: str) -> ManglingProxy:
        proxies.append(ManglingProxy(listen, upstream))
        return proxies[0]

    with separate(reach_draft=between) as running:
        running.wait_drafting(30)
        yield running


def run(stack: Stack, mode: int) -> list[list[int]]:
    def one(stream: tuple[str, float, int]) -> list[int]:
        prompt, temperature, seed = stream
        return stack.client.chat(prompt, mode=mode, max_tokens=48, temperature=temperature, seed=seed).token_ids

    with ThreadPoolExecutor(len(STREAMS)) as pool:
        return list(pool.map(one, STREAMS))


@functools.cache
def expected(stack: Stack) -> list[list[int]]:
    return run(stack, common_pb2.SPECULATION_MODE_OFF)


@pytest.mark.parametrize("kind", GARBAGE)
@pytest.mark.parametrize("mode", [common_pb2.SPECULATION_MODE_ON, common_pb2.SPECULATION_MODE_AUTO], ids=["on", "auto"])
def test_garbage_changes_no_token(stack: Stack, proxies: list[ManglingProxy], kind: str, mode: int) -> None:
    want = expected(stack)
    stack.wait_drafting(15)
    proxy = proxies[0]
    before = proxy.mangled
    proxy.mangle = GARBAGE[kind]
    try:
        got = run(stack, mode)
    finally:
        proxy.mangle = None
    assert got == want
    if mode == common_pb2.SPECULATION_MODE_ON:
        assert proxy.mangled > before, "no garbage was served"
    stack.wait_drafting(15)
    stack.assert_no_page_held()
