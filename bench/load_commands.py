"""The commands that load a server: `outrider bench serve`, `mixed` and `prefix`, with their flags."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.bench.options import (
    Device,
    DraftDir,
    Dtype,
    Force,
    Output,
    Prompts,
    StackTransport,
    TargetDir,
    choice,
    numbers,
    own_stack,
    result_file,
)
from outrider.services.stack.options import Transport
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.lifecycle import leave_on_terminate

OMITTABLE = ("ignore_eos", "min_p", "seed", "speculation", "stream_options", "top_k", "top_p")
ApiKey = Annotated[
    str | None,
    typer.Option(help="API key to send, if the server requires one.", envvar="OUTRIDER_API_KEY"),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="Address of a running server. The variable OUTRIDER_URL is ignored.",
        show_default="a stack is started",
    ),
]
Omit = Annotated[
    str,
    typer.Option(
        help="Comma-separated fields to leave out of the requests, such as ignore_eos, for servers that "
        "refuse them.",
        show_default="none",
    ),
]


def serve(
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of a running server: Outrider, or any server with OpenAI's API. The variable "
            "OUTRIDER_URL is ignored.",
            show_default="a stack is started",
        ),
    ] = None,
    grpc_address: Annotated[
        str | None, typer.Option("--grpc", help="gRPC address of a running gateway.", metavar="ADDRESS")
    ] = None,
    api: Annotated[str, typer.Option(help="Endpoint of the stack started here: rest or grpc.")] = "rest",
    api_key: ApiKey = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests per second on average (Poisson).", show_default="2.0"),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Closed loop: number of clients that each send one request after the other.",
            show_default="an open loop",
        ),
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds during which requests are sent.")] = 30.0,
    warm_up: Annotated[
        float, typer.Option(min=0.0, help="Seconds of the same load beforehand, not counted.")
    ] = 0.0,
    prompts: Prompts = None,
    route: Annotated[
        str,
        typer.Option(
            help="Route for the prompts of --prompts: chat (messages), or completions (their text, for "
            "models without a chat template)."
        ),
    ] = "chat",
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            help="Use random prompts of token ids. Each request draws one of these lengths: 16,256,2048.",
            show_default="the prompts of --prompts",
        ),
    ] = None,
    vocab: Annotated[
        int, typer.Option(min=16, help="The token ids of random prompts are below this number.")
    ] = 200,
    max_tokens: Annotated[
        str, typer.Option(help="Tokens per answer. Each request draws one of these lengths.")
    ] = "128",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy.", show_default="0.0")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            help="Samplings, of which each request draws one: greedy, temperature, top_k, top_p, min_p, "
            "filters, seed.",
            show_default="the one of --temperature",
        ),
    ] = None,
    speculation_mode: Annotated[
        str, typer.Option("--speculation", help="auto, on or off. Other servers than Outrider need auto.")
    ] = "auto",
    omit: Omit = "",
    first_token_limit: Annotated[
        float | None,
        typer.Option(
            help="Goodput: longest time to the first token, in milliseconds.", show_default="no limit"
        ),
    ] = None,
    per_token_limit: Annotated[
        float | None,
        typer.Option(
            help="Goodput: longest time per token after the first, in milliseconds.", show_default="no limit"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the arrival times and of the requests.")] = 0,
    target: TargetDir = None,
    draft: DraftDir = None,
    transport: StackTransport = Transport.AUTO,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Measure client latency under a load on any server: tokens/s, TTFT, ITL, e2e, goodput, accept length."""
    from outrider.bench.load.open_loop import Load
    from outrider.bench.load.rest import Route
    from outrider.bench.load.samplings import named_samplings
    from outrider.bench.load.serve import ServeApi, ServeOptions, run_serve

    leave_on_terminate()
    for first, second, both in (
        ("--url", "--grpc", url is not None and grpc_address is not None),
        ("--request-rate", "--concurrency", request_rate is not None and concurrency is not None),
        ("--temperature", "--sampling", temperature is not None and sampling is not None),
        ("--prompts", "--prompt-tokens", prompts is not None and prompt_tokens is not None),
    ):
        if both:
            raise ConfigurationError(f"{first} and {second} exclude each other; give only one.", field=first)
    rate = 2.0 if request_rate is None else request_rate
    if not rate > 0 or not duration > 0:
        raise ConfigurationError("--request-rate and --duration must be above 0.", field="--request-rate")
    speculation = {"mode": choice(speculation_mode, ("auto", "on", "off"), "--speculation")}
    endpoint = ServeApi(choice(api, [kind.value for kind in ServeApi], "--api"))
    path_of_text = Route(choice(route, [kind.value for kind in Route], "--route"))
    own = url is None and grpc_address is None
    options = ServeOptions(
        stack=own_stack(target, draft, transport, device, dtype),
        url=url,
        grpc=grpc_address,
        api=endpoint,
        api_key=api_key,
        load=Load(rate, duration, seed),
        concurrency=concurrency,
        warm_up_s=warm_up,
        prompts=prompts,
        prompt_tokens=[] if prompt_tokens is None else numbers(prompt_tokens, "--prompt-tokens"),
        vocab=vocab,
        max_tokens=numbers(max_tokens, "--max-tokens"),
        samplings=[{"temperature": temperature or 0.0}] if sampling is None else named_samplings(sampling),
        route=path_of_text,
        omitted=_fields(omit),
        speculation=speculation,
        first_token_limit_ms=first_token_limit,
        per_token_limit_ms=per_token_limit,
        output=result_file(output, "serve", device if own else "remote", force),
    )
    raise typer.Exit(run_serve(options))


def mixed(
    url: Url = None,
    api: Annotated[
        str,
        typer.Option(
            help="Format of the requests: outrider (/generate, all cases), or openai (/v1/completions with "
            "token ids, the cases without the speculation field)."
        ),
    ] = "outrider",
    api_key: ApiKey = None,
    only: Annotated[
        str,
        typer.Option(
            help="Parts to run, each with an optional pattern of names, such as odd:*tree*,soak. odd: speed "
            "beside one request that differs. auto: auto against off. gap: longest pause of streams while a "
            "long prompt prefills. ttft: time to first token by prompt length. soak: clients that differ in "
            "everything. form (not by default): answers that must match a JSON schema against free answers, "
            "and the speed of others beside one. rules (not by default): penalties, a logit bias and "
            "log-probabilities against greedy answers."
        ),
    ] = "odd,auto,gap,ttft,soak",
    omit: Omit = "",
    vocab: Annotated[
        int | None,
        typer.Option(
            help="The token ids of the prompts are below this number.",
            show_default="the vocabulary if the server states it, else 1000",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="odd and form: number of equal requests.", show_default="32")
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs; the figures are their medians.")] = 5,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="odd, auto, form and rules: tokens per prompt.")
    ] = 256,
    new_tokens: Annotated[int, typer.Option(min=1, help="odd, form and rules: tokens per answer.")] = 300,
    auto_batch: Annotated[str | None, typer.Option(help="auto: batch sizes.", show_default="1,16,64")] = None,
    auto_tokens: Annotated[
        str | None, typer.Option(help="auto: tokens per answer.", show_default="256,1500")
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(
            min=1, help="gap: tokens of the long prompt; soak: longest prompt.", show_default="12000"
        ),
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option(help="ttft: prompt lengths.", show_default="16,256,300,512,1024,2048,8192,32768"),
    ] = None,
    seconds: Annotated[float, typer.Option(help="soak: seconds per mix of requests.")] = 150.0,
    clients: Annotated[int, typer.Option(min=1, help="soak: number of clients.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the soak's choices.")] = 1,
    target: TargetDir = None,
    draft: DraftDir = None,
    transport: StackTransport = Transport.AUTO,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Measure how much of a server's speed remains when its requests differ in sampling, shape and length.

    If the server cannot run a default, such as prompts beyond its context, the default is reduced or left
    out.
    """
    from outrider.bench.mixed.client import RequestFormat
    from outrider.bench.mixed.command import MixedOptions, run_mixed
    from outrider.bench.mixed.plan import Wishes, parse_only

    leave_on_terminate()
    if not seconds > 0:
        raise ConfigurationError(f"--seconds {seconds:g}: expected a number above 0.", field="--seconds")
    form = RequestFormat(choice(api, [kind.value for kind in RequestFormat], "--api"))
    if url is None and form is RequestFormat.OPENAI:
        raise ConfigurationError("--api openai needs the --url of a running server.", field="--url")
    options = MixedOptions(
        stack=own_stack(target, draft, transport, device, dtype),
        url=url,
        api=form,
        api_key=api_key,
        only=parse_only(only),
        omitted=_fields(omit),
        vocab=vocab,
        wishes=Wishes(
            batch=batch,
            pairs=pairs,
            prompt=prompt_tokens,
            new=new_tokens,
            auto_batches=None if auto_batch is None else numbers(auto_batch, "--auto-batch"),
            auto_new=None if auto_tokens is None else numbers(auto_tokens, "--auto-tokens"),
            longest=longest,
            ttft=None if ttft is None else numbers(ttft, "--ttft"),
            seconds=seconds,
            clients=clients,
            seed=seed,
        ),
        output=result_file(output, "mixed", device if url is None else "remote", force),
    )
    raise typer.Exit(run_mixed(options))


def prefix(
    url: Url = None,
    api_key: ApiKey = None,
    chats: Annotated[int, typer.Option(min=1, help="Number of chats.")] = 200,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each chat.")] = 5,
    system_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the common system prompt.")] = 1500,
    turn_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the user in each turn.")] = 24,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 32,
    long_prompt: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt that is sent twice; 8192 for large models.")
    ] = 1536,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Measure in-process engines with random weights instead, with and without the cache: "
            "llama3.1-8b, tiny … All flags above except --long-prompt are then ignored.",
            show_default="a server is measured",
        ),
    ] = None,
    rounds: Annotated[
        str, typer.Option(help="With --shape: kinds of rounds, as in `bench latency`.")
    ] = "plain,chain5@3.5",
    batch: Annotated[str, typer.Option(help="With --shape: batch sizes.")] = "1,16,64",
    prompt: Annotated[int, typer.Option(min=1, help="With --shape: tokens per prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=3, help="With --shape: tokens per answer.")] = 128,
    pairs: Annotated[
        int, typer.Option(min=1, help="With --shape: pairs of runs with and without the cache.")
    ] = 7,
    clients: Annotated[int, typer.Option(min=1, help="Number of chats at the same time.")] = 8,
    vocab: Annotated[
        int, typer.Option(min=32, help="The token ids of prompts are below this number.")
    ] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    target: TargetDir = None,
    draft: DraftDir = None,
    transport: StackTransport = Transport.AUTO,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output: Output = None,
    force: Force = False,
) -> None:
    """Measure the share of prompt tokens that the prefix cache finds in many chats, with and without drafts.

    With --shape, measure the cost of a prefix cache that finds nothing.
    """
    from outrider.bench.load.shared_prefix import Chats, PrefixOptions, run_prefix

    leave_on_terminate()
    if shape is not None:
        from outrider.bench.measure.prefix_cost import cost_options, run_prefix_cost
        from outrider.bench.options import device_and_dtype
        from outrider.bench.stacks.engine_stack import EngineOptions
        from outrider.bench.stacks.remote_draft import DraftTransport
        from outrider.bench.stacks.shapes import named_shape
        from outrider.shared.obs.logging import configure_logging

        configure_logging("bench", "warning")
        way = DraftTransport("inproc" if transport is Transport.AUTO else transport.value)
        engine = EngineOptions(named_shape(shape), device, dtype, way, max_batch=1, max_len=1)
        sizes = numbers(batch, "--batch")
        measured = cost_options(engine, rounds, sizes, prompt, new_tokens, pairs, long_prompt)
        path = result_file(output, "prefix-cost", device_and_dtype(device, dtype)[0].type, force)
        raise typer.Exit(run_prefix_cost(measured, path))
    options = PrefixOptions(
        stack=own_stack(target, draft, transport, device, dtype),
        url=url,
        api_key=api_key,
        chats=Chats(chats, turns, system_tokens, turn_tokens, answer_tokens, vocab, seed),
        long_prompt=long_prompt,
        clients=clients,
        output=result_file(output, "prefix", device if url is None else "remote", force),
    )
    raise typer.Exit(run_prefix(options))


def _fields(text: str) -> tuple[str, ...]:
    """Parse the value of `--omit`.

    Raises:
        ConfigurationError: A field in the list is not one that can be left out.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        choice(name, OMITTABLE, "--omit")
    return names
