"""`outrider bench serve`: measures client latency under a load, over REST or gRPC.

The load is an open loop (Poisson arrivals) or a closed loop (a fixed number of clients). The server is any
server with OpenAI's API, or Outrider's gRPC service.

Before the load, the command sends a few requests one at a time. The latencies of these requests are the
floors: the best values that are possible under load.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from outrider.bench.load.open_loop import (
    PERCENTILES,
    Experience,
    Load,
    LoadClient,
    LoadRequest,
    LoadSummary,
    ask,
    run_clients,
    run_load,
    summarise_load,
)
from outrider.bench.load.rest import UNSENT, RestLoad, Route
from outrider.bench.load.samplings import Sampling
from outrider.bench.load.server import Server, find_server
from outrider.bench.measure.prompts import HELDOUT_PROMPTS, load_prompts
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.bench.report.surroundings import compiled_kernels
from outrider.services.stack.options import StackOptions
from outrider.services.stack.started_services import started_services
from outrider.shared.base.errors import ConfigurationError, UnavailableError
from outrider.shared.obs.progress import Progress

ALONE = 5
"""Number of counted requests sent one at a time before the load. One uncounted request precedes them."""
HELDOUT_COUNT = 40
FIRST_ID = 10
"""Lowest token id of random prompts. Lower ids are often special tokens."""

Requests = Callable[[int], LoadRequest]
"""Returns the request with a given index. The same index always gives the same request."""


class ServeApi(Enum):
    """API over which the load is sent."""

    REST = "rest"
    GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `outrider bench serve`. Most fields are its flags.

    Attributes:
        stack: The stack to start if no address is given.
        url, grpc: REST address and gRPC address of a running gateway.
        api: API to use if this command starts the stack.
        load: Arrival process of the requests. A closed loop uses only its duration and seed.
        concurrency: Number of clients of a closed loop. With None, the load is an open loop.
        warm_up_s: Seconds for which the load runs before its requests are counted.
        prompts: File of prompts. With None, the prompts that are part of `bench` are used.
        prompt_tokens: Lengths of random prompts, which replace the prompts of a file. If empty, there are no
            random prompts.
        vocab: Random prompts have token ids below this number.
        max_tokens, samplings: Lengths of answers, and sampling parameters. Each request draws one of each at
            random.
        route: REST route for requests with prompts of a file.
        omitted: Fields that REST requests leave out.
    """

    stack: StackOptions
    url: str | None
    grpc: str | None
    api: ServeApi
    api_key: str | None
    load: Load
    concurrency: int | None
    warm_up_s: float
    prompts: Path | None
    prompt_tokens: Sequence[int]
    vocab: int
    max_tokens: Sequence[int]
    samplings: Sequence[Sampling]
    route: Route
    omitted: Sequence[str]
    speculation: dict[str, Any]
    first_token_limit_ms: float | None
    per_token_limit_ms: float | None
    output: Path | None


def run_serve(options: ServeOptions) -> int:
    """Run `outrider bench serve`: run the load, print the table and save the result.

    Returns 1 if no request was answered, otherwise 0.

    Raises:
        ConfigurationError: The stack cannot be started, the prompts cannot be read, or the server refuses
            the requests.
        UnavailableError: No server answers at the address.
    """
    requests = load_requests(options)
    with ExitStack() as cleanup:
        url, grpc, start = options.url, options.grpc, None
        if url is None and grpc is None:
            began, cached = time.perf_counter(), compiled_kernels()
            cleanup.enter_context(started_services(options.stack))
            start = {
                "seconds": round(time.perf_counter() - began, 2),
                "kernels_cached": cached,
                "kernels_compiled": compiled_kernels() - cached,
            }
            port = options.stack.port
            url, grpc = (
                (f"http://127.0.0.1:{port}", None)
                if options.api is ServeApi.REST
                else (None, f"127.0.0.1:{port + 1}")
            )
        server = None if url is None else find_server(url, options.api_key)
        _check_speculation(options, server)
        summary, alone = asyncio.run(_measure(options, server, grpc, requests))
    settings = {
        "device": options.stack.device if options.url is None and options.grpc is None else "remote",
        "api": "rest" if url else "grpc",
        "server": None if server is None else server.as_json(),
        "request_rate": options.load.rate if options.concurrency is None else None,
        "concurrency": options.concurrency,
        "duration_s": options.load.duration_s,
        "warm_up_s": options.warm_up_s,
        "max_tokens": list(options.max_tokens),
        "prompt_tokens": list(options.prompt_tokens),
        "samplings": [dict(sampling) for sampling in options.samplings],
        "route": options.route.value,
        "speculation": None if server is not None and not server.is_outrider else options.speculation,
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
    rows = serve_rows(summary, alone, options.load, options.concurrency)
    code = show_and_save(Result("serve", settings, rows, more), options.output)
    print(
        f"{summary.requests} requests, {summary.failed} failed, accept length {summary.accept_length:.2f}",
        *summary.errors[:3],
        sep="\n",
    )
    return code if summary.failed < summary.requests else 1


def serve_rows(
    summary: LoadSummary, alone: LoadSummary, load: Load, concurrency: int | None = None
) -> list[Row]:
    """Return the figures of the load, each with its floor (the best possible value).

    The floor of a latency is the latency of requests that are sent one at a time. The floor of a rate in an
    open loop is the rate at which requests arrive. In a closed loop, it is the rate that the clients would
    reach if each had the server to itself.
    """
    if concurrency is None:
        offered = len(load.arrivals()) / load.duration_s  # the rate of these arrivals, not the nominal mean
        whence = "offered"
    else:
        offered, whence = concurrency * alone.request_rate, "clients × alone"
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
        Row("requests", summary.request_rate, "req/s", offered, whence),
        Row("requests within the limits (goodput)", summary.good_rate, "req/s", offered, whence),
        Row("tokens", summary.token_rate, "tok/s", offered * summary.tokens_per_request, whence),
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
    options: ServeOptions, server: Server | None, grpc: str | None, requests: Requests
) -> tuple[LoadSummary, LoadSummary]:
    client = _client(options, server, grpc)
    try:
        await _check_request(client, requests(0))
        if options.warm_up_s:
            before = Load(options.load.rate, options.warm_up_s, options.load.seed + 1)
            await _run("warm-up", client, before, options.concurrency, requests)
        lone = []
        with Progress("requests one at a time", ALONE) as progress:
            for index in range(ALONE):
                lone.append(await ask(client, requests(1 + index)))
                progress.advance()
        if all(experience.error for experience in lone):
            raise UnavailableError(f"The server answered no request: {lone[0].error}", field="url")
        loaded = await _run(
            "load", client, options.load, options.concurrency, lambda index: requests(ALONE + 1 + index)
        )
    finally:
        await client.close()
    limits = (options.first_token_limit_ms, options.per_token_limit_ms)
    return summarise_load(loaded, *limits, lasted_s=options.load.duration_s), summarise_load(lone, *limits)


async def _run(
    title: str, client: LoadClient, load: Load, concurrency: int | None, requests: Requests
) -> list[Experience]:
    """Run a load, and show its progress under this title."""
    # With a fixed number of clients, only the time of the load is known in advance.
    timed = concurrency is not None
    total = load.duration_s if timed else len(load.arrivals())
    with Progress(title, total, counts=not timed) as progress:
        began = time.perf_counter()

        def tell(answered: int) -> None:
            lasted_s = min(time.perf_counter() - began, load.duration_s)
            progress.tell(lasted_s if timed else answered, step=f"{answered} answered")

        if concurrency is None:
            return await run_load(client, load, requests, tell)
        return await run_clients(client, concurrency, load.duration_s, requests, tell)


async def _check_request(client: LoadClient, request: LoadRequest) -> None:
    """Send a request that is not counted.

    Raises:
        ConfigurationError: The server refuses the request, so it would refuse all other requests too.
    """
    try:
        await client.ask(request, Experience(time.perf_counter()))
    except ConfigurationError:
        raise
    except Exception:
        return  # the requests that follow record such failures


def _check_speculation(options: ServeOptions, server: Server | None) -> None:
    """Raise if the load would send the speculation object to a server that ignores it."""
    sent = options.speculation not in UNSENT
    if sent and server is not None and not server.is_outrider:
        raise ConfigurationError(
            f"--speculation {options.speculation['mode']}: the server at --url ({server.owner or 'unknown'}) "
            "is not Outrider and has no such field. Leave the option out.",
            field="--speculation",
        )


def _client(options: ServeOptions, server: Server | None, grpc: str | None) -> LoadClient:
    if grpc is not None:
        from outrider.bench.load.grpc import GrpcLoad

        return GrpcLoad(grpc, options.api_key)
    if server is None:
        raise ConfigurationError("Give --url or --grpc, or neither to start a stack here.", field="--url")
    return RestLoad(server, options.api_key, options.omitted)


def load_requests(options: ServeOptions) -> Requests:
    """Return the requests that `outrider bench serve` sends. They depend only on the options.

    Every server therefore gets the same requests.

    Random prompts are new for each request, so that no server finds them in a prefix cache. The prompts of a
    file are sent in a cycle.

    Raises:
        ConfigurationError: The prompts cannot be read.
    """
    prompts = [] if options.prompt_tokens else _file_prompts(options)

    def request(index: int) -> LoadRequest:
        draw = random.Random(f"{options.load.seed} {index}")
        prompt = (
            prompts[index % len(prompts)]
            if prompts
            else [draw.randrange(FIRST_ID, options.vocab) for _ in range(draw.choice(options.prompt_tokens))]
        )
        return LoadRequest(
            prompt,
            draw.choice(options.max_tokens),
            draw.choice(options.samplings),
            index,
            options.speculation,
        )

    return request


def _file_prompts(options: ServeOptions) -> list[Any]:
    """Return the prompts of the file: messages, or the messages' text for the route of text completions."""
    path = options.prompts or HELDOUT_PROMPTS
    count = (
        HELDOUT_COUNT
        if options.prompts is None
        else sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    )
    found = load_prompts(path, count)
    if options.route is Route.CHAT:
        return list(found)
    return ["\n\n".join(message["content"] for message in messages) for messages in found]
