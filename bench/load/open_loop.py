"""An open-loop load: requests arrive by a Poisson process, whether or not the ones before them are answered; and what they experienced."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.bench.measure.clock import percentile

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request: a text, chat messages or token ids, and how much to answer."""

    prompt: str | Sequence[int] | Sequence[dict[str, str]]
    max_tokens: int
    temperature: float
    seed: int
    speculation: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.prompt, str) and bool(self.prompt) and isinstance(self.prompt[0], dict)


@dataclass(slots=True)
class Experience:
    """What one request met with; seconds of `time.perf_counter`.

    Attributes:
        sent: When it was sent.
        chunks: When pieces of the answer arrived.
        ended: When the stream ended.
        tokens: Of the answer, as the server counted.
        accept_length, draft_rounds: As the server says.
        error: Of a request that failed; empty otherwise.
    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    accept_length: float = 0.0
    draft_tokens: int = 0
    error: str = ""

    @property
    def first_token_s(self) -> float:
        """From sending it to the first piece."""
        return self.chunks[0] - self.sent

    @property
    def per_token_s(self) -> float:
        """Mean time of a token after the first."""
        return (self.chunks[-1] - self.chunks[0]) / max(self.tokens - 1, 1)

    @property
    def whole_s(self) -> float:
        """From sending it to the end."""
        return self.ended - self.sent


class LoadClient(Protocol):
    """Sends one request to an endpoint and notes what comes back."""

    async def ask(self, request: LoadRequest, experience: Experience) -> None:
        """Stream the answer; fills `experience`, raises what goes wrong."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come.

    Attributes:
        rate: Requests per second on average.
        duration_s: How long they come; the last are then answered still.
        seed: Of the arrivals.
    """

    rate: float
    duration_s: float
    seed: int = 0

    def arrivals(self) -> list[float]:
        """Return the moments of arrival in seconds from the start, at least one."""
        gaps = random.Random(self.seed)
        moments = [0.0]
        while (moment := moments[-1] + gaps.expovariate(self.rate)) < self.duration_s:
            moments.append(moment)
        return moments


async def run_load(
    client: LoadClient, load: Load, request: Callable[[int], LoadRequest], told: Callable[[int], None]
) -> list[Experience]:
    """Send requests at their moments and wait for all answers.

    Args:
        client: Where to.
        load: When.
        request: Makes the n-th.
        told: Called with the number of answered requests.
    """
    started = time.perf_counter()
    answered = 0

    async def one(index: int) -> Experience:
        nonlocal answered
        experience = await ask(client, request(index))
        answered += 1
        told(answered)
        return experience

    tasks = []
    for index, moment in enumerate(load.arrivals()):
        await asyncio.sleep(max(0.0, started + moment - time.perf_counter()))
        tasks.append(asyncio.create_task(one(index)))
    return list(await asyncio.gather(*tasks))


async def ask(client: LoadClient, request: LoadRequest) -> Experience:
    """Return what one request meets with; an error is noted, not raised."""
    experience = Experience(time.perf_counter())
    try:
        await client.ask(request, experience)
        if not experience.chunks:
            experience.error = "an empty answer"
    except Exception as error:  # whatever a broken server does is a result of this measurement
        experience.error = f"{type(error).__name__}: {error}"[:300]
    experience.ended = time.perf_counter()
    return experience


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """What a load experienced, in milliseconds where not said otherwise.

    Attributes:
        first_token, between, per_token, whole: Percentiles by `PERCENTILES`: TTFT, gaps between pieces, mean time of a token, e2e.
        requests, failed: Counts.
        request_rate, token_rate: Answered per second, over the time from the first arrival to the last answer, or as long as requests might
            arrive.
        good_rate: Answered per second within the limits; equal to `request_rate` without limits.
        tokens_per_request: Mean of those answered.
        accept_length: Mean over requests with drafts, weighted by tokens; 1.0 without any.
        errors: Of failed requests, each once.
    """

    first_token: dict[int, float]
    between: dict[int, float]
    per_token: dict[int, float]
    whole: dict[int, float]
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
    """Reduce what a load experienced; the limits are those of goodput, `lasted_s` the seconds during which requests might arrive."""
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
        whole=_percentiles([experience.whole_s for experience in answered]),
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
