"""Commands that talk to running services: `outrider generate`, `chat`, `top` and `health`."""

from __future__ import annotations

import json
import os
import ssl
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from outrider.shared.base.errors import InvalidRequestError

DEFAULT_URL = "http://127.0.0.1:8000"
Url = Annotated[str, typer.Option(help="URL of the gateway.", envvar="OUTRIDER_URL")]
ApiKey = Annotated[
    str | None,
    typer.Option(help="API key to send, if the gateway requires one.", envvar="OUTRIDER_API_KEY"),
]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculation", help="Speculative decoding: auto, on or off.", show_default="the mode of the server"
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate.")]
DEFAULT_MAX_TOKENS = 256
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the sampling, for repeatable answers.", show_default="drawn by the server"),
]


def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            help="The prompt; without it, or with `-`, the prompt is read from standard input.",
            show_default=False,
        ),
    ] = "-",
    url: Url = DEFAULT_URL,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer and its numbers as one JSON object.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of tokens to generate.",
            show_default=f"{DEFAULT_MAX_TOKENS}, or as many as fit into the model's context",
        ),
    ] = None,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    speculation: Speculation = None,
    api_key: ApiKey = None,
) -> None:
    """Send one prompt to a running gateway and print the answer."""
    from outrider.services.clients.rest import RestClient, StreamedReply
    from outrider.services.terminal.chat import print_summary
    from outrider.services.terminal.context_room import stream_with_default_limit

    if prompt == "-" and sys.stdin.isatty():
        typer.echo("Type the prompt. End it with Ctrl-D on a line of its own.", err=True)
    text = sys.stdin.read() if prompt == "-" else prompt
    if prompt == "-" and not text.strip():
        raise InvalidRequestError(
            "There is no prompt: standard input is empty. Give the prompt as an argument, for example "
            '`outrider generate "List 3 countries."`, or pipe a text into the command.',
            field="prompt",
        )
    reply = StreamedReply()
    with RestClient(url, api_key) as client:
        limit = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        options = _request_options(limit, temperature, seed, speculation)
        if as_json:
            options["return_token_ids"] = True
        if max_tokens is None:
            pieces = stream_with_default_limit(client, text, options, reply, raw=raw)
        elif raw:
            pieces = client.stream_completion(text, options, reply)
        else:
            pieces = client.stream_chat([{"role": "user", "content": text}], options, reply)
        for piece in pieces:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
    if as_json:
        typer.echo(json.dumps(asdict(reply)))
        return
    sys.stdout.write("\n")
    print_summary(reply, Console(stderr=True, highlight=False))


def chat(
    url: Url = DEFAULT_URL,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    speculation: Speculation = None,
    system: Annotated[str, typer.Option(help="System prompt.", show_default=False)] = "",
    api_key: ApiKey = None,
) -> None:
    """Chat with the model through a running gateway. Colours show which tokens were drafted.

    /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
    """
    from outrider.services.clients.rest import RestClient
    from outrider.services.terminal.chat import run_chat
    from outrider.services.terminal.conversation import Conversation

    options: dict[str, int | float] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    with RestClient(url, api_key) as client:
        run_chat(client, Conversation(options, speculation, system))


def top(
    url: Url = DEFAULT_URL,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each status as one line of JSON.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Show load, memory, speculation and the last errors of a running stack.

    The arrow keys, Page Up and Page Down scroll. q or Ctrl-C quits.
    """
    from outrider.services.clients.rest import RestClient
    from outrider.services.terminal.top import run_top

    with RestClient(url, api_key) as client:
        run_top(client, interval, once, as_json)


def _request_options(
    max_tokens: int, temperature: float, seed: int | None, speculation: str | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    if speculation is not None:
        options["speculation"] = {"mode": speculation}
    return options


def health(
    url: Url = DEFAULT_URL,
    grpc_address: Annotated[
        str | None,
        typer.Option(
            "--grpc",
            help="Check the gRPC service at this address (host:port, unix:/path or ipc:///path) instead of "
            "the gateway.",
            metavar="ADDRESS",
        ),
    ] = None,
    service: Annotated[str, typer.Option(help="With --grpc: name of the gRPC service to check.")] = "",
    own_tls: Annotated[
        bool,
        typer.Option(
            "--own-tls",
            help="Check the gateway of this environment: if OUTRIDER_GATEWAY_TLS_CERT is set, connect by TLS "
            "with the gateway's own certificate, and do not verify it. For health checks of containers.",
        ),
    ] = False,
) -> None:
    """Report whether the services accept requests.

    Exit code 0: the services (or the service at --grpc) accept requests. 1: a service refuses requests.
    """
    if grpc_address:
        from outrider.services.clients.health import ServingProbe
        from outrider.shared.rpc.address import grpc_address as calls_of

        with ServingProbe(calls_of(grpc_address, "--grpc"), service) as probe:
            status = probe.status()
        typer.echo(f"{grpc_address} {service} {status}".replace("  ", " "))
        raise typer.Exit(0 if status == "SERVING" else 1)
    from outrider.services.clients.rest import RestClient, gateway_url

    verify: ssl.SSLContext | bool = True
    if own_tls and os.environ.get("OUTRIDER_GATEWAY_TLS_CERT"):
        from outrider.services.stack.own_certificate import probe_context

        cert, key, ca = (os.environ.get(f"OUTRIDER_GATEWAY_TLS_{name}") for name in ("CERT", "KEY", "CA"))
        verify = probe_context(*(Path(file) if file else None for file in (cert, key, ca)))
        url = f"https://{gateway_url(url).partition('://')[2]}"
    with RestClient(url, verify=verify) as client:
        answers = {path: client.answer(path) for path in ("/health", "/ready")}
    for path, (status_code, body) in answers.items():
        typer.echo(f"{client.url}{path} {status_code or 'no answer'} {body or ''}".rstrip())
    raise typer.Exit(0 if all(status_code == 200 for status_code, _ in answers.values()) else 1)
