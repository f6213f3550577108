"""Cases of `outrider bench mixed` that compare two speeds.

- `form`: requests whose answers must match a JSON schema, compared with the same requests without a schema.
- `rules`: requests with penalties, a logit bias and log-probabilities, compared with greedy requests.
- `odd`: a batch beside one different request, compared with the same batch beside one more equal request.
- `auto`: requests with speculation mode `auto`, compared with mode `off`.

Each pair of runs measures both speeds, and the order of the two runs alternates from pair to pair. The ratio
is the median over the pairs.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from outrider.bench.mixed.cases import AUTO, AUTO_GOAL, PLAIN, MixedSizes, Pairing, RequestKind, Section
from outrider.bench.mixed.client import MixedClient, together
from outrider.bench.mixed.figures import MixedFigure
from outrider.shared.base.errors import UnavailableError

WARM_UP_TOKENS = 64
"""Longest answer of the requests that warm up a case."""

Speed = Callable[[RequestKind, int], Awaitable[float]]
"""Returns tokens/s for a kind of request and a length of answers."""


async def measure_odd(
    client: MixedClient, pairing: Pairing, sizes: MixedSizes, section: Section = Section.ODD
) -> list[MixedFigure]:
    """Measure the speed of a batch of equal requests while one odd request runs beside the batch.

    The ratio is this speed divided by the speed of the same batch beside one more request of the usual kind.
    """

    async def speed(beside: RequestKind, new: int) -> float:
        return await _speed_beside(client, pairing.usual, beside, new, sizes)

    alike, unlike, ratios = await _in_pairs(speed, pairing.usual, pairing.odd, sizes.new, sizes.pairs)
    return [
        MixedFigure(
            section,
            pairing.name,
            unlike,
            "tok/s",
            statistics.median(ratios),
            pairing.goal,
            more={
                "tok_s_alike": round(alike, 1),
                "ratios": _rounded(ratios),
                "batch": sizes.batch,
                "usual": pairing.usual.as_json(),
                "odd": pairing.odd.as_json(),
            },
        )
    ]


async def measure_cost(
    client: MixedClient,
    section: Section,
    name: str,
    kinds: tuple[RequestKind, RequestKind],
    batch: int,
    goal: float | None,
    sizes: MixedSizes,
) -> list[MixedFigure]:
    """Measure the speed of a batch of the second kind, and its ratio to the speed of the first kind."""
    base, other = kinds
    free, costly, ratios = await _in_pairs(
        _speed_of(client, batch, sizes), base, other, sizes.new, sizes.pairs
    )
    return [
        MixedFigure(
            section,
            name,
            costly,
            "tok/s",
            statistics.median(ratios),
            goal,
            more={
                "tok_s_free": round(free, 1),
                "ratios": _rounded(ratios),
                "batch": batch,
                "new_tokens": sizes.new,
                "usual": base.as_json(),
                "other": other.as_json(),
            },
        )
    ]


async def measure_auto(client: MixedClient, batch: int, new: int, sizes: MixedSizes) -> list[MixedFigure]:
    """Measure the speed of a batch of `auto` requests, and its ratio to the speed of `off`."""
    speed = _speed_of(client, batch, sizes)
    off, auto, ratios = await _in_pairs(speed, PLAIN, AUTO, new, sizes.pairs)
    return [
        MixedFigure(
            Section.AUTO,
            f"auto ÷ off, batch {batch}, {new} tokens",
            auto,
            "tok/s",
            statistics.median(ratios),
            AUTO_GOAL,
            more={
                "tok_s_off": round(off, 1),
                "ratios": _rounded(ratios),
                "batch": batch,
                "new_tokens": new,
            },
        )
    ]


def _speed_of(client: MixedClient, batch: int, sizes: MixedSizes) -> Speed:
    """Return the function that measures the speed of a batch of equal requests."""

    async def speed(kind: RequestKind, tokens: int) -> float:
        bodies = [client.body(sizes.prompt, tokens, kind) for _ in range(batch)]
        return await _speed(client, bodies, tokens)

    return speed


async def _in_pairs(
    speed: Speed, base: RequestKind, other: RequestKind, new: int, pairs: int
) -> tuple[float, float, list[float]]:
    """Return the median speeds with `base` and `other`, and the ratio other ÷ base of each pair."""
    for kind in (base, other):
        await speed(kind, min(new, WARM_UP_TOKENS))
    found: list[tuple[float, float]] = []
    for index in range(pairs):
        if index % 2 == 0:
            first = await speed(base, new)
            found.append((first, await speed(other, new)))
        else:
            first = await speed(other, new)
            found.append((await speed(base, new), first))
    ratios = [with_other / with_base for with_base, with_other in found]
    return statistics.median(pair[0] for pair in found), statistics.median(pair[1] for pair in found), ratios


async def _speed(client: MixedClient, bodies: list[bytes], new: int) -> float:
    """Send requests at the same time and return their tokens/s. `new` replaces a count that is missing."""
    started = time.perf_counter()
    answers = await together(client.send(body) for body in bodies)
    seconds = time.perf_counter() - started
    return sum(answer.tokens or new for answer in answers) / seconds


async def _speed_beside(
    client: MixedClient, usual: RequestKind, beside: RequestKind, new: int, sizes: MixedSizes
) -> float:
    """Return the tokens/s of a batch of usual requests while a request of another kind always runs."""
    begun, finished = asyncio.Event(), asyncio.Event()

    async def keep_one_running() -> None:
        while not finished.is_set():
            body = client.body(sizes.prompt, new, beside, stream=True)
            async with client.stream(body) as stream, aclosing(stream.arrivals()) as arrivals:
                async for _ in arrivals:
                    begun.set()
                if not stream.pieces:
                    raise UnavailableError("A streamed answer had no piece.", field="--url")

    async def batch() -> float:
        bodies = [client.body(sizes.prompt, new, usual) for _ in range(sizes.batch)]
        await begun.wait()
        try:
            return await _speed(client, bodies, new)
        finally:
            finished.set()

    speeds = await together((keep_one_running(), batch()))
    return speeds[1] or 0.0


def _rounded(ratios: list[float]) -> list[float]:
    return [round(ratio, 4) for ratio in ratios]
