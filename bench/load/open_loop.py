"""Runs open-loop and closed-loop loads: records each request's timeline (TTFT, ITL, errors) and sums them up.

In an open-loop load, requests arrive by a Poisson process and do not wait for earlier answers. In a
closed-loop load, there is a fixed number of clients. Each client sends its next request when its previous
request has been answered.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.bench.measure.clock import percentile

PERCENTILES = (50, 90, 99)
PAUSE_AFTER_ERROR_S = 0.1


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: its prompt (a text, chat messages or token ids) and its options.

    Attributes:
        sampling: The parameter `temperature` and, if the request has them, `top_k`, `top_p` and `min_p`.
        speculation: The request's `speculation` object.
    """

    prompt: str | Sequence[int] | Sequence[dict[str, str]]
    max_tokens: int
    sampling: Mapping[str, float]
    seed: int
    speculation: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.prompt, str) and bool(self.prompt) and isinstance(self.prompt[0], dict)


@dataclass(slots=True)
class Experience:
    """Timeline and counts of one request, in seconds of `time.perf_counter`.

    Attributes:
        sent: Time at which the request was sent.
        chunks: Time at which each piece of the answer arrived.
        ended: Time at which the stream ended.
        tokens: Number of tokens in the answer, as the server counts them.
        accept_length, draft_tokens: Accept length and number of draft tokens that the server reports.
        error: Error of a failed request. Empty if the request succeeded.
        status: HTTP status of a refused request. 0 for other requests.
        retry_after_s: The ``Retry-After`` of a refused request, or None.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    accept_length: float = 0.0
    draft_tokens: int = 0
    error: str = ""
    status: int = 0
    retry_after_s: float | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds from sending the request to the first piece of the answer (TTFT)."""
        return self.chunks[0] - self.sent

    @property
    def per_token_s(self) -> float:
        """Mean seconds per token after the first (TPOT)."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.tokens - 1, 1)

    @property
    def total_s(self) -> float:
        """Seconds from sending the request to the end of the stream (e2e)."""
        return self.ended - self.sent


class LoadClient(Protocol):
    """Sends requests to one endpoint and records the timeline of each request."""

    async def ask(self, request: LoadRequest, experience: Experience) -> None:
        """Stream the answer and fill `experience`. Raises any error."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Arrival process of the requests of an open-loop load (a Poisson process).

    Attributes:
        rate: Mean number of requests per second.
        duration_s: Seconds during which requests arrive. Answers may arrive later.
        seed: Seed of the arrival times.
    """

    rate: float
    duration_s: float
    seed: int = 0

    def arrivals(self) -> list[float]:
        """Return the arrival times in seconds from the start. There is at least one arrival."""
        gaps = random.Random(self.seed)
        moments = [0.0]
        while (moment := moments[-1] + gaps.expovariate(self.rate)) < self.duration_s:
            moments.append(moment)
        return moments


async def run_load(
    client: LoadClient, load: Load, request: Callable[[int], LoadRequest], on_answer: Callable[[int], None]
) -> list[Experience]:
    """Run an open-loop load: send requests at their arrival times, and wait for all answers.

    Args:
        client: Client that sends the requests.
        load: Arrival process of the requests.
        request: Function that returns the request with a given index.
        on_answer: Called after each answer with the number of requests answered so far.
    """
    started = time.perf_counter()
    answered = 0

    async def one(index: int) -> Experience:
        nonlocal answered
        experience = await ask(client, request(index))
        answered += 1
        on_answer(answered)
        return experience

    tasks = []
    for index, moment in enumerate(load.arrivals()):
        await asyncio.sleep(max(0.0, started + moment - time.perf_counter()))
        tasks.append(asyncio.create_task(one(index)))
    return list(await asyncio.gather(*tasks))


async def run_clients(
    client: LoadClient,
    clients: int,
    duration_s: float,
    request: Callable[[int], LoadRequest],
    on_answer: Callable[[int], None],
) -> list[Experience]:
    """Run a closed-loop load: each client sends requests one after another. Return after the last answer.

    Args:
        client: Client that sends the requests.
        clients: Number of concurrent clients. Each of them has one request in flight.
        duration_s: Seconds during which requests are sent. Each client sends at least one request.
        request: Function that returns the request with a given index.
        on_answer: Called after each answer with the number of requests answered so far.
    """
    ends = time.perf_counter() + duration_s
    indices = itertools.count()
    experiences: list[Experience] = []

    async def one() -> None:
        while True:
            experiences.append(await ask(client, request(next(indices))))
            on_answer(len(experiences))
            if experiences[-1].error:
                # A broken server must not be flooded, and a full one says when to come back.
                await asyncio.sleep(experiences[-1].retry_after_s or PAUSE_AFTER_ERROR_S)
            if time.perf_counter() >= ends:
                return

    await asyncio.gather(*(one() for _ in range(clients)))
    return experiences


async def ask(client: LoadClient, request: LoadRequest) -> Experience:
    """Send one request and return its timeline. Errors are recorded and not raised."""
    experience = Experience(time.perf_counter())
    try:
        await client.ask(request, experience)
        if not experience.chunks:
            experience.error = "an empty answer"
    except Exception as error:  # any failure of the server is a result of this measurement
        experience.error = f"{type(error).__name__}: {error}"[:300]
    experience.ended = time.perf_counter()
    return experience


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Summary of a load; times are in milliseconds.

    Attributes:
        first_token, between, per_token, total: In this order: TTFT, gaps between pieces, mean time per token,
            and time from request to last token (e2e). Each attribute maps the percentiles in `PERCENTILES` to
            values.
        requests, failed: Number of requests, and number of failed requests.
        request_rate, token_rate: Answered requests per second, and the tokens of these requests per second.
            Both are means over the time from the first arrival to the last answer, or over the arrival period
            if that is longer.
        good_rate: Answered requests per second whose latencies were within the limits (goodput). If there are
            no limits, `good_rate` equals `request_rate`.
        tokens_per_request: Mean number of tokens of the answered requests.
        accept_length: Mean accept length of the requests that had drafts, weighted by tokens. 1.0 if no
            request had drafts.
        errors: Distinct errors of the failed requests.
    """

    first_token: dict[int, float]
    between: dict[int, float]
    per_token: dict[int, float]
    total: dict[int, float]
    requests: int
    failed: int
    request_rate: float
    token_rate: float
    good_rate: float
    tokens_per_request: float
    accept_length: float
    errors: list[str]


def summarise_load(
    experiences: Sequence[Experience],
    first_token_limit_ms: float | None,
    per_token_limit_ms: float | None,
    lasted_s: float = 0.0,
) -> LoadSummary:
    """Summarise the timelines of a load's requests.

    Args:
        experiences: Timelines of all requests.
        first_token_limit_ms, per_token_limit_ms: Limits for goodput. With None, there is no limit.
        lasted_s: Length of the arrival period, in seconds.
    """
    answered = [experience for experience in experiences if not experience.error]
    span = max((experience.ended for experience in experiences), default=0.0) - min(
        (experience.sent for experience in experiences), default=0.0
    )
    span = max(span, lasted_s, 1e-9)
    good = [
        experience
        for experience in answered
        if experience.first_token_s * 1e3 <= (first_token_limit_ms or float("inf"))
        and experience.per_token_s * 1e3 <= (per_token_limit_ms or float("inf"))
    ]
    gaps = [
        later - earlier
        for experience in answered
        for earlier, later in zip(experience.chunks, experience.chunks[1:], strict=False)
    ]
    drafted = [experience for experience in answered if experience.draft_tokens]
    weight = sum(experience.tokens for experience in drafted)
    return LoadSummary(
        first_token=_percentiles([experience.first_token_s for experience in answered]),
        between=_percentiles(gaps),
        per_token=_percentiles([experience.per_token_s for experience in answered if experience.tokens > 1]),
        total=_percentiles([experience.total_s for experience in answered]),
        requests=len(experiences),
        failed=len(experiences) - len(answered),
        request_rate=len(answered) / span,
        token_rate=sum(experience.tokens for experience in answered) / span,
        good_rate=len(good) / span,
        tokens_per_request=sum(experience.tokens for experience in answered) / max(len(answered), 1),
        accept_length=sum(experience.accept_length * experience.tokens for experience in drafted) / weight
        if weight
        else 1.0,
        errors=sorted({experience.error for experience in experiences if experience.error}),
    )


def _percentiles(seconds: Sequence[float]) -> dict[int, float]:
    return {percent: percentile(seconds, percent) * 1e3 if seconds else 0.0 for percent in PERCENTILES}
