"""Tests of the embedded pair served on a GPU by real processes, with the draft in-process and separate."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from support.services.gateway_client import Result
from support.services.stack import PROMPTS, Stack, supervised

from outrider.common.v1 import common_pb2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ON, OFF = common_pb2.SPECULATION_MODE_ON, common_pb2.SPECULATION_MODE_OFF
TRANSPORTS = ["inproc", "ipc", "grpc"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with supervised("--dtype", "float32", "--transport", request.param, device="cuda") as running:
        running.wait_drafting(60)  # the draft may still record its graphs
        # The first batch of this size may decode plainly, while a separate draft compiles its kernels.
        deadline = time.monotonic() + 60
        while max(accept_lengths(run(running, ON, 0.0))) <= 2:
            assert time.monotonic() < deadline, running.processes[0].output[-8000:]
        yield running


def run(stack: Stack, mode: int, temperature: float) -> list[Result]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        chat = partial(stack.client.chat, mode=mode, temperature=temperature, max_tokens=96, trace=True)
        return list(pool.map(lambda item: chat(item[1], seed=item[0]), enumerate(PROMPTS)))


def accept_lengths(results: list[Result]) -> list[float]:
    return [result.finished.speculation.accept_length for result in results if result.finished]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token_in_fp32(stack: Stack, temperature: float) -> None:
    plain = run(stack, OFF, temperature)
    speculative = run(stack, ON, temperature)
    assert [result.token_ids for result in speculative] == [result.token_ids for result in plain]
    print("accept lengths", accept_lengths(speculative))
    assert max(accept_lengths(speculative)) > 2, stack.processes[0].output[-8000:]


def test_alone_and_batched_agree_in_fp32(stack: Stack) -> None:
    batched = run(stack, ON, 0.0)
    alone = [
        stack.client.chat(prompt, mode=ON, max_tokens=96, seed=seed) for seed, prompt in enumerate(PROMPTS)
    ]
    assert [result.token_ids for result in batched] == [result.token_ids for result in alone]


def test_the_status_names_memory_graphs_and_transport(stack: Stack, request: pytest.FixtureRequest) -> None:
    run(stack, ON, 0.0)
    used = httpx.get(f"{stack.base_url}/status.json", timeout=30).json()["target"]["resources"]
    assert used["draft_transport"] == request.node.callspec.params["stack"]
    assert used["draft_on_device"] is not None
    assert used["graphs_recorded"] > 0
    assert 0 < used["weight_bytes"] + used["kv_bytes"] < used["gpu_used_bytes"] < used["gpu_total_bytes"]


def test_nothing_leaks(stack: Stack) -> None:
    for _ in range(3):
        run(stack, ON, 1.0)
    stack.assert_no_page_held()
