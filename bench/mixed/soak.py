"""The case `soak`: many clients whose requests differ in everything, some of which cancel."""

from __future__ import annotations

import asyncio
import random
import re
import resource
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from outrider.bench.load.samplings import Sampling
from outrider.bench.measure.clock import percentile
from outrider.bench.mixed.cases import MixedSizes, RequestKind, Section, SpeculationMix
from outrider.bench.mixed.client import MixedClient, together
from outrider.bench.mixed.figures import MixedFigure

STREAMED_SHARE, CANCELLED_SHARE, IGNORE_EOS_SHARE = 0.5, 0.3, 0.5
"""Share of requests that stream, share of streams that are cancelled, and share that ignores end tokens."""
PIECES_BEFORE_CANCEL = 6
PAUSE_AFTER_ERROR_S = 0.1
SETTLE_S = 10.0
"""Longest wait for the server's gauges to return to zero after the last answer."""
POLL_S = 0.25
ERROR_CHARS = 160
GAUGE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+([-+.\deE]+)$", re.MULTILINE)
LEFT_OVER = re.compile(r"running|waiting|leaked")
NO_GAUGE = ("_bucket", "_sum", "_count", "_total", "_created")


@dataclass(slots=True)
class MixedTally:
    """Counts that the clients of a soak (a long run of mixed requests) collect.

    Attributes:
        completed, cancelled: Number of requests that were answered, and number of requests that a client
            cancelled.
        tokens: Number of tokens received for completed and cancelled requests.
        latencies: Durations of the completed requests, in seconds.
        errors: Kind of error → number of requests that failed with this error.
    """

    completed: int = 0
    cancelled: int = 0
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


async def measure_soak(
    client: MixedClient, mix: SpeculationMix, samplings: Sequence[Sampling], sizes: MixedSizes
) -> list[MixedFigure]:
    """Let the clients send requests for `sizes.seconds`, and report speed, latency, errors and leftovers."""
    tally = MixedTally()
    started, processor = time.perf_counter(), time.process_time()
    await together(
        _client(client, number, mix.kinds, samplings, sizes, started + sizes.seconds, tally)
        for number in range(sizes.clients)
    )
    seconds, busy = time.perf_counter() - started, time.process_time() - processor
    left = await left_over(client)
    failed = sum(tally.errors.values())
    more = {
        "mix": mix.name,
        "clients": sizes.clients,
        "seconds": round(seconds, 2),
        "completed": tally.completed,
        "cancelled": tally.cancelled,
        "failed": failed,
        "client_cpu_share": round(busy / seconds, 3),
        "client_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    speed = tally.tokens / seconds
    figures = [
        MixedFigure(Section.SOAK, f"{mix.name}: tokens", speed, "tok/s", goal=mix.tok_s_goal, more=more)
    ]
    for name, percent, goal_s in (("p50", 50, None), ("p99", 99, mix.p99_goal_s), ("worst", 100, None)):
        if tally.latencies:
            latency = percentile(tally.latencies, percent)
            figures.append(
                MixedFigure(
                    Section.SOAK,
                    f"{mix.name}: latency, {name}",
                    latency,
                    "s",
                    goal=goal_s,
                    at_least=False,
                )
            )
    figures.append(
        MixedFigure(
            Section.SOAK,
            f"{mix.name}: failed",
            failed,
            "requests",
            goal=0,
            at_least=False,
            more={"errors": dict(tally.errors)},
        )
    )
    if left is not None:
        figures.append(
            MixedFigure(
                Section.SOAK,
                f"{mix.name}: left over",
                sum(left.values()),
                "entries",
                goal=0,
                at_least=False,
                more={"left_over": left},
            )
        )
    return figures


async def left_over(client: MixedClient) -> dict[str, float] | None:
    """Return the gauges of a server's running, waiting and leaked resources that do not return to zero.

    The function waits at most `SETTLE_S` seconds for zero. It returns None if the server has no such gauges.
    """
    ends = time.perf_counter() + SETTLE_S
    while True:
        gauges = {
            name + labels: float(value)
            for name, labels, value in GAUGE.findall(await client.metrics())
            if LEFT_OVER.search(name + labels) and not name.endswith(NO_GAUGE)
        }
        if not gauges:
            return None
        left = {name: value for name, value in gauges.items() if value}
        if not left or time.perf_counter() >= ends:
            return left
        await asyncio.sleep(POLL_S)


async def _client(
    client: MixedClient,
    number: int,
    kinds: Sequence[RequestKind],
    samplings: Sequence[Sampling],
    sizes: MixedSizes,
    ends: float,
    tally: MixedTally,
) -> None:
    """Send one request after another. Only client 0 sends the longest prompts too."""
    draw = random.Random(f"{sizes.seed} {number}")
    prompts = [*sizes.soak_prompts, *([sizes.longest] if number == 0 else [])]
    while time.perf_counter() < ends:
        kind = replace(draw.choice(kinds), sampling=draw.choice(samplings))
        streamed, cut = draw.random() < STREAMED_SHARE, draw.random() < CANCELLED_SHARE
        body = client.body(
            draw.choice(prompts),
            draw.choice(sizes.soak_answers),
            kind,
            ignore_eos=draw.random() < IGNORE_EOS_SHARE,
            stream=streamed,
        )
        began = time.perf_counter()
        try:
            if streamed:
                cancelled = await _stream(client, body, cut, tally)
            else:
                # Await first, because `tally.tokens += await …` would overwrite the tokens that other clients
                # add meanwhile.
                answer = await client.send(body)
                tally.tokens += answer.tokens
                cancelled = False
        except Exception as error:  # any failure of the server is a result of this measurement
            tally.errors[_kind_of(error)] += 1
            await asyncio.sleep(PAUSE_AFTER_ERROR_S)
            continue
        if cancelled:
            tally.cancelled += 1
        else:
            tally.completed += 1
            tally.latencies.append(time.perf_counter() - began)


async def _stream(client: MixedClient, body: bytes, cut: bool, tally: MixedTally) -> bool:
    """Stream an answer, or only its first pieces with `cut`. Returns whether the request was cancelled."""
    async with client.stream(body) as stream, aclosing(stream.arrivals()) as arrivals:
        cancelled = False
        async for _ in arrivals:
            if cut and stream.pieces >= PIECES_BEFORE_CANCEL:
                cancelled = True
                break
    tally.tokens += stream.tokens
    return cancelled


def _kind_of(error: Exception) -> str:
    """Return the error's text. Numbers after the status are replaced, so that equal errors are one kind."""
    text = f"{type(error).__name__} {error}"[:ERROR_CHARS]
    return re.sub(r"\d+(?!\d*: )", "#", text)
