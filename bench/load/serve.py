"""`outrider bench serve`: measures client latency under an open-loop Poisson load, over REST or gRPC.

Before the load, the command sends a few requests one at a time. The figures of these lone requests are the
floor of the figures under load.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.progress import Progress

from outrider.bench.load.open_loop import (
    PERCENTILES,
    Load,
    LoadClient,
    LoadRequest,
    LoadSummary,
    ask,
    run_load,
    summarise_load,
)
from outrider.bench.load.rest import RestLoad
from outrider.bench.measure.prompts import HELDOUT_PROMPTS, load_prompts
from outrider.bench.report.record import Result, Row, finish
from outrider.bench.report.surroundings import compiled_kernels
from outrider.services.clients.rest import RestClient
from outrider.services.stack.launch import running_stack
from outrider.services.stack.options import StackOptions
from outrider.shared.base.errors import ConfigurationError, UnavailableError

ALONE = 5
"""Number of counted requests sent one at a time before the load. One uncounted request precedes them."""
HELDOUT_COUNT = 40
RANDOM_IDS = (10, 200)
"""Range of the token ids in random prompts. Such low ids exist in every vocabulary."""


class Api(Enum):
    """API over which the load is sent."""

    REST = "rest"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the measurement. Most fields are flags of `outrider bench serve`.

    Attributes:
        stack: The stack to start if no address is given.
        url, grpc: REST and gRPC address of a running gateway.
        api: Endpoint to use in a stack that this command starts.
        load: Arrival process of the requests.
        warm_up_s: Seconds of load before anything is counted.
        prompts: File of prompts. None selects the embedded prompts.
        prompt_tokens: Length of random prompts, which replace the prompts of the file. None disables them.
    """

    stack: StackOptions
    url: str | None
    grpc: str | None
    api: Api
    api_key: str | None
    load: Load
    warm_up_s: float
    prompts: Path | None
    prompt_tokens: int | None
    max_tokens: int
    temperature: float
    speculation: dict[str, Any]
    first_token_limit_ms: float | None
    per_token_limit_ms: float | None
    output: Path | None


def run_serve(options: ServeOptions) -> int:
    """Run the load, print the table and save the result. Returns 1 if no request was answered, otherwise 0.

    Raises:
        ConfigurationError: The stack cannot be started, or the prompts cannot be read.
        UnavailableError: No server answers at the address.
    """
    requests = _requests(options)
    log: deque[str] = deque(maxlen=40)
    try:
        with ExitStack() as cleanup:
            url, grpc, start = options.url, options.grpc, None
            if url is None and grpc is None:
                began, cached = time.perf_counter(), compiled_kernels()
                cleanup.enter_context(
                    running_stack(
                        options.stack, lambda name, line: log.append(f"{name} | {line}"), lambda line: None
                    )
                )
                start = {
                    "seconds": round(time.perf_counter() - began, 2),
                    "kernels_cached": cached,
                    "kernels_compiled": compiled_kernels() - cached,
                }
                port = options.stack.port
                url, grpc = (
                    (f"http://127.0.0.1:{port}", None)
                    if options.api is Api.REST
                    else (None, f"127.0.0.1:{port + 1}")
                )
            summary, alone = asyncio.run(_measure(options, url, grpc, requests))
    except Exception:
        print(*log, sep="\n", file=sys.stderr)
        raise
    settings = {
        "device": options.stack.device if options.url is None and options.grpc is None else "remote",
        "api": "rest" if url else "grpc",
        "request_rate": options.load.rate,
        "duration_s": options.load.duration_s,
        "warm_up_s": options.warm_up_s,
        "max_tokens": options.max_tokens,
        "prompt_tokens": options.prompt_tokens,
        "temperature": options.temperature,
        "speculation": options.speculation,
        "first_token_limit_ms": options.first_token_limit_ms,
        "per_token_limit_ms": options.per_token_limit_ms,
        "acceptance": "real",
    }
    more = {
        "start": start,
        "requests": summary.requests,
        "failed": summary.failed,
        "errors": summary.errors,
        "accept_length": round(summary.accept_length, 4),
    }
    code = finish(Result("serve", settings, serve_rows(summary, alone, options.load), more), options.output)
    print(
        f"{summary.requests} requests, {summary.failed} failed, accept length {summary.accept_length:.2f}",
        *summary.errors[:3],
        sep="\n",
    )
    return code if summary.failed < summary.requests else 1


def serve_rows(summary: LoadSummary, alone: LoadSummary, load: Load) -> list[Row]:
    """Return the figures. A time's floor is the time of lone requests; a rate's floor is the offered rate."""
    offered = len(load.arrivals()) / load.duration_s  # the rate of these arrivals, not the nominal mean
    rows = []
    for name, under_load, floor in (
        ("time to first token", summary.first_token, alone.first_token),
        ("between pieces (ITL)", summary.between, alone.between),
        ("per token after the first (TPOT)", summary.per_token, alone.per_token),
        ("whole request (e2e)", summary.total, alone.total),
    ):
        rows += [
            Row(f"{name}, p{percent}", under_load[percent], "ms", floor[50], "alone, p50")
            for percent in PERCENTILES
        ]
    rows += [
        Row("requests", summary.request_rate, "req/s", offered, "offered"),
        Row("requests within the limits (goodput)", summary.good_rate, "req/s", offered, "offered"),
        Row("tokens", summary.token_rate, "tok/s", offered * summary.tokens_per_request, "offered"),
        Row(
            "tokens a round with drafts (accept length)",
            summary.accept_length,
            "tok/round",
            alone.accept_length,
            "alone",
        ),
    ]
    return rows


async def _measure(
    options: ServeOptions, url: str | None, grpc: str | None, requests: Sequence[LoadRequest]
) -> tuple[LoadSummary, LoadSummary]:
    client = _client(options, url, grpc)
    try:
        if options.warm_up_s:
            before = Load(options.load.rate, options.warm_up_s, options.load.seed + 1)
            await run_load(
                client, before, lambda index: requests[index % len(requests)], lambda _answered: None
            )
        lone = [await ask(client, requests[index % len(requests)]) for index in range(ALONE + 1)][1:]
        if all(experience.error for experience in lone):
            raise UnavailableError(f"The server answered no request: {lone[0].error}", field="url")
        with Progress(transient=True) as progress:
            task = progress.add_task("answered", total=len(options.load.arrivals()))
            loaded = await run_load(
                client,
                options.load,
                lambda index: requests[(ALONE + 1 + index) % len(requests)],
                lambda answered: progress.update(task, completed=answered),
            )
    finally:
        await client.close()
    limits = (options.first_token_limit_ms, options.per_token_limit_ms)
    return summarise_load(loaded, *limits, lasted_s=options.load.duration_s), summarise_load(lone, *limits)


def _client(options: ServeOptions, url: str | None, grpc: str | None) -> LoadClient:
    if grpc is not None:
        from outrider.bench.load.grpc import GrpcLoad

        return GrpcLoad(grpc, options.api_key)
    if url is None:
        raise ConfigurationError("Give --url or --grpc, or neither to start a stack here.", field="--url")
    with RestClient(url, options.api_key) as asked:
        return RestLoad(url, asked.model, options.api_key)


def _requests(options: ServeOptions) -> list[LoadRequest]:
    """Return the requests to send in a cycle, each with a seed of its own."""
    prompts: list[Any]
    if options.prompt_tokens is not None:
        draw = random.Random(options.load.seed)
        prompts = [
            [draw.randrange(*RANDOM_IDS) for _ in range(options.prompt_tokens)] for _ in range(HELDOUT_COUNT)
        ]
    else:
        path = options.prompts or HELDOUT_PROMPTS
        count = (
            HELDOUT_COUNT
            if options.prompts is None
            else sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        )
        prompts = list(load_prompts(path, count))
    return [
        LoadRequest(prompt, options.max_tokens, options.temperature, seed, options.speculation)
        for seed, prompt in enumerate(prompts)
    ]
