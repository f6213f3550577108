"""Measures how fast a key's clients are beside another key that floods the services, but has a limit.

Both keys have clients that send one request after another (a closed loop). The flooding key may run one
sequence at a time, and has a limit of tokens per minute. The gateway answers its other requests with 429.
Its clients then wait as Retry-After says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from outrider.bench.load.open_loop import Experience, LoadClient, LoadRequest, ask, run_clients

STEADY_CLIENTS, FLOOD_CLIENTS = 2, 60
PAIRS = 4
"""Number of times that both loads run, in turn, so that a slow moment of the machine hits both."""

Requests = Callable[[int], LoadRequest]


async def rates_beside_limited_key(
    steady: LoadClient,
    flood: LoadClient,
    requests: Callable[[int], Requests],
    seconds: float,
    on_pair: Callable[[int], Any] = lambda done: None,
) -> tuple[float, float]:
    """Return the requests/s of the steady key: alone, and while the other key floods the services.

    The flooding key first uses up the tokens of a minute, which an unused limit holds.

    Args:
        steady: Sends requests with the key that is measured.
        flood: Sends requests with the key that has a limit.
        requests: Returns the requests of a client load by its number. Equal numbers mean equal requests.
        seconds: Duration of each of the 2 · `PAIRS` measurements, in seconds.
        on_pair: Called with the number of finished pairs.
    """
    alone = beside = 0.0
    while not (await ask(flood, requests(1)(0))).error:
        pass
    for pair in range(PAIRS):
        alone += await _rate(steady, requests(0), seconds)
        flooding = asyncio.create_task(
            run_clients(flood, FLOOD_CLIENTS, 2 * seconds, requests(1), lambda answered: None)
        )
        try:
            await asyncio.sleep(seconds / 4)
            beside += await _rate(steady, requests(0), seconds)
        finally:
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)
        on_pair(pair + 1)
    return alone / PAIRS, beside / PAIRS


async def _rate(client: LoadClient, requests: Requests, seconds: float) -> float:
    """Return the answered requests per second of the steady key's clients."""
    began = time.perf_counter()
    experiences = await run_clients(client, STEADY_CLIENTS, seconds, requests, lambda answered: None)
    answered: list[Experience] = [one for one in experiences if not one.error]
    return len(answered) / (time.perf_counter() - began)
