"""Cases about waiting: `gap` (a long prompt and running streams delay each other) and `ttft`."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

from outrider.bench.mixed.cases import PLAIN, MixedSizes, RequestKind, RunningStreams, Section
from outrider.bench.mixed.client import MixedClient, together
from outrider.bench.mixed.figures import MixedFigure
from outrider.shared.base.errors import UnavailableError

NUM_STREAMS = 4
PIECES_BEFORE = 16
"""Number of pieces that each stream must have delivered before the long prompt is sent."""
LONG_ALONE = 3
"""Number of long prompts that are sent alone. The fastest one counts."""
TTFT_WARM_UP, TTFT_COUNTED = 9, 5
"""Number of warm-up prompts of each length, and number of prompts that count after them.

The warm-up is needed because a server may record a CUDA graph of a pass only after some uses.
"""


class StreamPause(NamedTuple):
    """The time between two pieces of a stream: its length in seconds, and its begin (`time.perf_counter`)."""

    seconds: float
    begin: float


async def measure_gap(client: MixedClient, streams: RunningStreams, sizes: MixedSizes) -> list[MixedFigure]:
    """Measure the longest pause of running streams during a long prompt, and the TTFT of that prompt.

    Raises:
        UnavailableError: No stream received two pieces around the time of the long prompt.
    """
    name, kind = streams.name, streams.kind
    alone = min([(await client.send(client.body(sizes.longest, 1, kind))).seconds for _ in range(LONG_ALONE)])
    longest, began, usual, beside = [], [], [], []
    for _ in range(sizes.pairs):
        arrivals, sent, answered = await _streams_beside_prompt(client, kind, sizes)
        pauses = [pause for times in arrivals for pause in _pauses(times, sent, answered)]
        if not pauses:
            raise UnavailableError("The streams ended too early. Raise --new-tokens.", field="--new-tokens")
        worst = max(pauses)
        longest.append(worst.seconds)
        began.append(worst.begin - sent)
        for times in arrivals:
            before = [moment for moment in times if moment <= sent]
            usual += [pause.seconds for pause in _pauses(before, 0.0, sent)]
        beside.append(answered - sent)
    pause, usually, ttft = (statistics.median(values) for values in (longest, usual, beside))
    more = {"long_prompt": sizes.longest, "streams": NUM_STREAMS}
    return [
        MixedFigure(
            Section.GAP,
            f"longest pause of {name} streams",
            pause * 1e3,
            "ms",
            pause / usually,
            streams.pause_goal_ms,
            at_least=False,
            limits_value=True,
            more={
                **more,
                "usual_ms": round(usually * 1e3, 3),
                "runs_ms": _milliseconds(longest),
                "runs_at_ms": _milliseconds(began),
            },
        ),
        MixedFigure(
            Section.GAP,
            f"TTFT of the long prompt beside {name} streams",
            ttft * 1e3,
            "ms",
            ttft / alone,
            streams.ttft_goal,
            at_least=False,
            more={**more, "alone_ms": round(alone * 1e3, 3), "runs_ms": _milliseconds(beside)},
        ),
    ]


async def measure_ttft(client: MixedClient, length: int, goal_ms: float | None) -> list[MixedFigure]:
    """Measure the time from sending a prompt to the whole answer of one token. Blocks the event loop."""
    bodies = [client.body(length, 1, PLAIN) for _ in range(TTFT_WARM_UP + TTFT_COUNTED)]
    with client.alone() as alone:
        seconds = [alone.send(body).seconds for body in bodies][TTFT_WARM_UP:]
    more = {"prompt": length, "best_ms": round(min(seconds) * 1e3, 3), "runs_ms": _milliseconds(seconds)}
    return [
        MixedFigure(
            Section.TTFT,
            f"prompt of {length}",
            statistics.median(seconds) * 1e3,
            "ms",
            goal=goal_ms,
            at_least=False,
            more=more,
        )
    ]


async def _streams_beside_prompt(
    client: MixedClient, kind: RequestKind, sizes: MixedSizes
) -> tuple[Sequence[Sequence[float]], float, float]:
    """Send a long prompt while streams run. When a stream ends, another one starts.

    Returns:
        The arrival times of the pieces of each stream, the time at which the prompt was sent, and the time at
        which it was answered. Every stream that runs at the end has a piece after the prompt's answer.
    """
    answers: list[list[float]] = []
    pieces = [0] * NUM_STREAMS
    moved = asyncio.Condition()
    sent = answered = 0.0

    async def read(number: int) -> None:
        # Use different lengths, so that the streams do not all end while the long prompt runs.
        length = sizes.stream - number * sizes.stream // (2 * NUM_STREAMS)
        while True:
            times: list[float] = []
            answers.append(times)
            body = client.body(sizes.prompt, length, kind, stream=True)
            async with client.stream(body) as stream, aclosing(stream.arrivals()) as arrivals:
                async for moment in arrivals:
                    times.append(moment)
                    pieces[number] += 1
                    async with moved:
                        moved.notify_all()
                    if answered and moment > answered:
                        return

    async def interrupt() -> None:
        nonlocal sent, answered
        prompt = client.body(sizes.longest, 1, kind)
        async with moved:
            await moved.wait_for(lambda: min(pieces) >= PIECES_BEFORE)
        sent = time.perf_counter()
        await client.send(prompt)
        answered = time.perf_counter()

    await together([interrupt(), *(read(number) for number in range(NUM_STREAMS))])
    return answers, sent, answered


def _pauses(times: Sequence[float], begin: float, end: float) -> list[StreamPause]:
    """Return the pauses between pieces that overlap with the span from `begin` to `end`."""
    return [
        StreamPause(later - earlier, earlier)
        for earlier, later in itertools.pairwise(times)
        if later > begin and earlier < end
    ]


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [round(value * 1e3, 3) for value in seconds]
