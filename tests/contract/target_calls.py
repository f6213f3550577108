"""Helpers for tests with several targets: a request, its tokens, and waiting for targets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fake_target import FakeTarget, Script, chain_tokens
from gateway_thread import GatewayThread

from outrider.target.v1 import target_pb2

PROMPT = [9, 12, 40]
NEW_TOKENS = 12
MakeTarget = Callable[..., FakeTarget]


def wait_all(gateway: GatewayThread, count: int) -> None:
    """Wait until `count` targets are ready."""

    async def all_ready() -> None:
        pool = gateway.server.core.targets
        while sum(one.client.ready for one in pool.members) != count:
            await pool.changed()

    gateway.call(all_ready())


def body(**fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 3}
    return {"input_ids": PROMPT, "sampling_params": sampling, **fields}


def expected() -> list[int]:
    options = target_pb2.GenerateRequest(prompt_ids=PROMPT)
    options.sampling.temperature, options.sampling.seed = 1.0, 3
    return chain_tokens(options, NEW_TOKENS)


def gated(gate: threading.Semaphore) -> Callable[[target_pb2.GenerateRequest], Script]:
    """Return a script of one token a step. Each step but the first waits for the gate."""
    return lambda request: Script([[one] for one in chain_tokens(request, NEW_TOKENS)], gate=gate)
