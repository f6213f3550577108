"""`outrider bench overload`: sends requests faster than the services can answer them.

The command first measures the capacity, with clients that wait for their answers. It then sends requests at
rates derived from this capacity. Requests arrive whether or not earlier ones have been answered (an open
loop). There are five loads:

1. less than the capacity, for comparison;
2. more than the capacity;
3. the requests of one API key that stays within its limits, alone;
4. the same requests, while another key sends far too many requests;
5. clients that wait for their answers: two of one key alone, and then beside many of a key with a limit
   (`limited_key`).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.bench.faults.limited_key import FLOOD_CLIENTS, STEADY_CLIENTS, rates_beside_limited_key
from outrider.bench.faults.processes import usages
from outrider.bench.load.open_loop import Experience, Load, LoadRequest, run_clients, run_load
from outrider.bench.load.rest import RestLoad
from outrider.bench.load.server import Server, find_server
from outrider.bench.measure.clock import percentile
from outrider.bench.measure.prompts import HELDOUT_PROMPTS, load_prompts
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.services.stack.launch import Stack
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.base.errors import UnavailableError
from outrider.shared.obs.progress import Progress

BELOW, ABOVE, WITHIN = 0.8, 1.5, 0.3
"""Offered shares of the capacity: in the comparison, in the overload, and of the key within its limits."""
CLIENTS_PER_SLOT = 2
DEFAULT_SLOTS = 16
PROMPTS = 40
SAMPLE_S = 0.5
RELOAD_S = 3.0
CAPACITY_SHARES = 3
"""The capacity is the median of this many measurements."""
LOADS = 5
"""Number of loads after these measurements. All of them last equally long."""
FIRST_TOKEN_GOAL, TENANT_GOAL, MEMORY_GOAL = 3.0, 0.8, 1.1
REFUSED = 429
STEADY, FLOOD, LIMITED = "steady-tenant", "flooding-tenant", "limited-tenant"
KEYS = {name: f"sk-bench-{name}-0001" for name in (STEADY, FLOOD, LIMITED)}


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    """Options of `outrider bench overload`. Most fields are its flags.

    Attributes:
        stack: The stack of services to start.
        requests: Number of requests in the load above the capacity.
        capacity_s: Duration of the measurement of the capacity, in seconds.
        max_tokens: Lengths of answers. Each request draws one of them at random.
        max_queue_wait_s: The gateway's setting of this name, in seconds. With None, the gateway's default.
        seed: Seed of the arrival times and of the lengths.
        flood_share: Tokens per minute of the key with a limit, as a share of the capacity.
        output: The JSON file for the result.
    """

    stack: StackOptions
    requests: int
    capacity_s: float
    max_tokens: Sequence[int]
    max_queue_wait_s: float | None
    seed: int
    flood_share: float
    output: Path


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one open-loop load, as measured by its clients.

    Attributes:
        rate: Requests that the clients sent per second.
        experiences: Timelines of all requests.
        seconds: Duration of the arrivals, and duration of the whole load until the last answer.
        memory_mib: Largest memory of each service during the load, in MiB.
    """

    rate: float
    experiences: Sequence[Experience]
    seconds: tuple[float, float]
    memory_mib: Mapping[str, float]

    @property
    def answered(self) -> list[Experience]:
        """The requests that were answered."""
        return [one for one in self.experiences if not one.error]

    @property
    def refused(self) -> list[Experience]:
        """The requests that got status 429."""
        return [one for one in self.experiences if one.status == REFUSED]

    def first_token(self, percent: float) -> float:
        """Return a percentile of the time to the first token of the answered requests, in seconds.

        Raises:
            UnavailableError: No request was answered.
        """
        if not self.answered:
            raise UnavailableError(
                f"No request was answered: {self.experiences[0].error}", field="--requests"
            )
        return percentile([one.first_token_s for one in self.answered], percent)

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        errors = {one.error for one in self.experiences if one.error and one.status != REFUSED}
        refused = self.refused
        return {
            "offered_per_s": round(self.rate, 3),
            "requests": len(self.experiences),
            "answered": len(self.answered),
            "refused": len(refused),
            "refused_with_retry_after": sum(one.retry_after_s is not None for one in refused),
            "retry_after_s": sorted({one.retry_after_s for one in refused if one.retry_after_s is not None}),
            "refused_after_p99_s": round(percentile([one.total_s for one in refused], 99), 4)
            if refused
            else None,
            "other_errors": sorted(errors)[:5],
            "arrivals_s": round(self.seconds[0], 2),
            "whole_s": round(self.seconds[1], 2),
            "first_token_s": {percent: round(self.first_token(percent), 4) for percent in (50, 90, 99)},
            "token_rate_of_a_request": round(
                statistics.median(one.tokens / one.total_s for one in self.answered), 2
            ),
            "peak_rss_mib": dict(self.memory_mib),
        }


def run_overload(options: OverloadOptions) -> int:
    """Run `outrider bench overload`: send all loads, print the table and save the result.

    Returns:
        The exit code: 1 if a request failed with a status other than 429, or if a reply with status 429 had
        no header ``Retry-After``. Otherwise 0.

    Raises:
        ConfigurationError: The stack cannot be started.
        UnavailableError: The services answer no request.
    """
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
        started = _with_keys(options, folder)
        stack = cleanup.enter_context(started_services(started))
        return asyncio.run(_measure(options, stack, started))


def _with_keys(options: OverloadOptions, folder: Path) -> StackOptions:
    """Return the options of a stack with several API keys. The file of the keys is written into `folder`."""
    file = folder / "keys.toml"
    file.touch(mode=0o600)
    _write_keys(file, "")
    settings = {"api_keys_file": file, "max_queue_wait_s": options.max_queue_wait_s}
    return replace(options.stack, gateway_settings={**options.stack.gateway_settings, **settings})


def _write_keys(file: Path, limits: str) -> None:
    """Write the keys into a file. `limits` are TOML lines for the key `LIMITED`, which is the last one."""
    keys = [f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()]
    file.write_text("".join(keys) + limits, encoding="ascii")


async def _limit_flood(options: OverloadOptions, stack: StackOptions, capacity: float) -> None:
    """Limit the key `LIMITED`, and wait until the gateway has read its file again."""
    tokens = options.flood_share * capacity * statistics.mean(options.max_tokens) * 60
    limits = f"max_concurrent = 1\ntokens_per_minute = {max(1, round(tokens))}\n"
    _write_keys(Path(str(stack.gateway_settings["api_keys_file"])), limits)
    await asyncio.sleep(RELOAD_S)


async def _measure(options: OverloadOptions, stack: Stack, started: StackOptions) -> int:
    server = find_server(stack.url, KEYS[STEADY])
    loads = {name: RestLoad(server, key) for name, key in KEYS.items()}
    try:
        with Progress("measuring the capacity", CAPACITY_SHARES, counts=False) as progress:
            capacities = [
                await _capacity(options, server, loads[FLOOD], number, progress)
                for number in range(CAPACITY_SHARES)
            ]
        capacity = statistics.median(capacities)
        seconds = options.requests / (ABOVE * capacity)
        with Progress("load", LOADS, counts=False) as progress:

            async def offer(name: str, rate: float, step: str, done: int, number: int = 0) -> LoadResult:
                on_answer = _share_of(seconds, done, progress, step)
                return await _offer(options, stack, loads[name], rate, seconds, on_answer, number)

            below = await offer(FLOOD, BELOW * capacity, f"{BELOW:g} × capacity", 0)
            above = await offer(FLOOD, ABOVE * capacity, f"{ABOVE:g} × capacity", 1)
            alone = await offer(STEADY, WITHIN * capacity, "one key within its limits", 2)
            beside, flood = await asyncio.gather(
                offer(STEADY, WITHIN * capacity, "the same beside a flood", 3),
                offer(FLOOD, ABOVE * capacity, "the same beside a flood", 3, 1),
            )
            progress.tell(LOADS - 1, step="clients that wait, beside a key with a limit")
            await _limit_flood(options, started, capacity)
            closed = await rates_beside_limited_key(
                loads[STEADY], loads[LIMITED], lambda number: _requests(options, number), seconds / 4
            )
    finally:
        for load in loads.values():
            await load.close()
    offers = {"0.8": below, "1.5": above, "alone": alone, "beside": beside, "flood": flood}
    return _report(options, capacities, offers, closed)


def _share_of(seconds: float, done: int, progress: Progress, step: str) -> Callable[[int], None]:
    """Return a function for `on_answer` that shows the progress of a load that lasts some seconds.

    Args:
        seconds: Duration of the load.
        done: Number of earlier loads.
        progress: Receives `done` plus the share of this load's time that has passed.
        step: Text to show.
    """
    began = time.perf_counter()

    def tell(answered: int) -> None:
        progress.tell(done + min(1.0, (time.perf_counter() - began) / seconds), step=step)

    return tell


async def _capacity(
    options: OverloadOptions, server: Server, load: RestLoad, number: int, progress: Progress
) -> float:
    """Return the requests per second that are answered if the services always have more than they can run."""
    clients = CLIENTS_PER_SLOT * (server.max_running or DEFAULT_SLOTS)
    ask = _requests(options, number + 2)
    seconds = options.capacity_s / CAPACITY_SHARES
    began = time.perf_counter()
    step = f"{number + 1} of {CAPACITY_SHARES}"
    experiences = await run_clients(load, clients, seconds, ask, _share_of(seconds, number, progress, step))
    ends = began + seconds
    answered = [one for one in experiences if not one.error and one.ended <= ends]
    if not answered:
        raise UnavailableError(
            f"No answer within {seconds:g} s: {experiences[0].error}. Raise --capacity-seconds.",
            field="--capacity-seconds",
        )
    # The first answers arrive late, because all clients begin at the same time.
    first = min(one.ended for one in answered)
    return (len(answered) - 1) / (ends - first) if len(answered) > 1 else 1 / seconds


async def _offer(
    options: OverloadOptions,
    stack: Stack,
    load: RestLoad,
    rate: float,
    seconds: float,
    on_answer: Callable[[int], None],
    number: int,
) -> LoadResult:
    """Offer requests in an open loop, and wait for all answers."""
    memory: dict[str, float] = {}

    async def sample() -> None:
        while True:
            for name, usage in usages(stack.supervisor).items():
                memory[name] = max(memory.get(name, 0.0), usage.rss_mib)
            await asyncio.sleep(SAMPLE_S)

    sampler = asyncio.create_task(sample())
    began = time.perf_counter()
    try:
        experiences = await run_load(
            load,
            Load(rate, seconds, options.seed + number),
            _requests(options, number),
            on_answer,
        )
    finally:
        sampler.cancel()
    return LoadResult(rate, experiences, (seconds, time.perf_counter() - began), memory)


def _requests(options: OverloadOptions, number: int) -> Any:
    """Return the requests of a load: chats whose answers have different lengths."""
    prompts = load_prompts(HELDOUT_PROMPTS, PROMPTS)

    def request(index: int) -> LoadRequest:
        draw = random.Random(f"{options.seed} {number} {index}")
        lengths = options.max_tokens
        return LoadRequest(
            prompts[index % len(prompts)], draw.choice(lengths), {"temperature": 0.0}, index, {"mode": "auto"}
        )

    return request


def _report(
    options: OverloadOptions,
    capacities: Sequence[float],
    offers: Mapping[str, LoadResult],
    closed: tuple[float, float],
) -> int:
    below, above, alone, beside = (offers[name] for name in ("0.8", "1.5", "alone", "beside"))
    refused = [one for offer in offers.values() for one in offer.refused]
    silent = sum(one.retry_after_s is None for one in refused)
    broken = sum(
        bool(one.error) and one.status != REFUSED for offer in offers.values() for one in offer.experiences
    )
    memory = sum(above.memory_mib.values()) / sum(below.memory_mib.values())
    first = above.first_token(99) / below.first_token(99)
    kept = (len(beside.answered) / beside.seconds[1]) / (len(alone.answered) / alone.seconds[1])
    rows = [
        Row(
            "capacity",
            statistics.median(capacities),
            "req/s",
            more={"runs": [round(one, 3) for one in capacities]},
        ),
        Row("first token at 0.8 × capacity, p99", below.first_token(99), "s"),
        Row("first token of the answered at 1.5 × capacity, p99", above.first_token(99), "s"),
        Row("first token, 1.5 × ÷ 0.8 × capacity, p99", first, "×", more=_at_most(first, FIRST_TOKEN_GOAL)),
        Row("refused with 429 at 1.5 × capacity", len(above.refused) / len(above.experiences), "of all"),
        Row("429 without Retry-After", silent, "requests", more=_at_most(silent, 0)),
        Row("failed otherwise", broken, "requests", more=_at_most(broken, 0)),
        Row("peak memory, 1.5 × ÷ 0.8 × capacity", memory, "×", more=_at_most(memory, MEMORY_GOAL)),
        Row(
            "requests/s of a key within its limits, beside a flood ÷ alone",
            kept,
            "×",
            more={"goal": TENANT_GOAL, "goal_is": "at least", "met": kept >= TENANT_GOAL},
        ),
        Row("its first token beside a flood, p99", beside.first_token(99), "s"),
        Row(
            f"requests/s of {STEADY_CLIENTS} clients, beside {FLOOD_CLIENTS} of a limited key ÷ alone",
            closed[1] / closed[0],
            "×",
            more={
                "alone_per_s": round(closed[0], 3),
                "flood_share": options.flood_share,
                "goal": TENANT_GOAL,
                "goal_is": "at least",
                "met": closed[1] >= TENANT_GOAL * closed[0],
            },
        ),
    ]
    settings = {
        "device": options.stack.device,
        "requests": options.requests,
        "max_tokens": list(options.max_tokens),
        "max_queue_wait_s": options.max_queue_wait_s,
        "seed": options.seed,
        "flood_share": options.flood_share,
        "transport": options.stack.transport.value,
    }
    more = {"offers": {name: offer.as_json() for name, offer in offers.items()}}
    show_and_save(Result("overload", settings, rows, more), options.output, shown=("goal", "met"))
    return int(bool(silent or broken))


def _at_most(value: float, goal: float) -> dict[str, Any]:
    return {"goal": goal, "goal_is": "at most", "met": value <= goal}
