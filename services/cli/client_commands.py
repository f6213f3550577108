"""Commands that talk to running services: `outrider generate`, `outrider chat` and `outrider health`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

Url = Annotated[str, typer.Option(help="URL of the gateway.")]
ApiKey = Annotated[str | None, typer.Option(help="API key to send, if the gateway requires one.")]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculation", help="Speculative decoding: auto, on or off.", show_default="the server's: auto"
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the sampling, for repeatable answers.", show_default="drawn by the server"),
]


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input.")],
    url: Url = "http://127.0.0.1:8000",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as plain text, without the chat template.")
    ] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    speculation: Speculation = None,
    api_key: ApiKey = None,
) -> None:
    """Send one prompt to a running gateway and print the answer."""
    from outrider.services.clients.rest import Reply, RestClient

    text = sys.stdin.read() if prompt == "-" else prompt
    reply = Reply()
    with RestClient(url, api_key) as client:
        options = _request_options(max_tokens, temperature, seed, speculation)
        if raw:
            pieces = client.stream_completion(text, options, reply)
        else:
            pieces = client.stream_chat([{"role": "user", "content": text}], options, reply)
        _print_pieces(pieces)
    _print_summary(reply)


def chat(
    url: Url = "http://127.0.0.1:8000",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    speculation: Speculation = None,
    api_key: ApiKey = None,
) -> None:
    """Chat with the model through a running gateway.

    An empty line or Ctrl-D ends the chat.
    """
    from outrider.services.clients.rest import Reply, RestClient

    messages: list[dict[str, str]] = []
    with RestClient(url, api_key) as client:
        options = _request_options(max_tokens, temperature, seed, speculation)
        while question := _ask():
            messages.append({"role": "user", "content": question})
            reply = Reply()
            _print_pieces(client.stream_chat(messages, options, reply))
            _print_summary(reply)
            messages.append({"role": "assistant", "content": reply.text})


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _request_options(
    max_tokens: int, temperature: float, seed: int | None, speculation: str | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        options["seed"] = seed
    if speculation is not None:
        options["speculation"] = {"mode": speculation}
    return options


def _print_pieces(pieces: Any) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _print_summary(reply: Any) -> None:
    speculation = reply.speculation
    drafted = bool(speculation.get("draft_tokens"))
    speculated = (
        f", accept length {speculation['accept_length']:.2f} over {speculation['rounds']} rounds"
        if drafted
        else ""
    )
    console = Console(stderr=True, highlight=False)
    console.print(
        f"[dim]{reply.completion_tokens} tokens, {reply.tokens_per_s:.0f}/s, "
        f"{reply.finish_reason}{speculated}[/]"
    )


def health(
    url: Url = "http://127.0.0.1:8000",
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
    from outrider.services.clients.rest import RestClient

    with RestClient(url) as client:
        answers = {path: client.status(path) for path in ("/health", "/ready")}
    for path, (status_code, body) in answers.items():
        typer.echo(f"{url}{path} {status_code or 'no answer'} {body or ''}".rstrip())
    raise typer.Exit(0 if all(status_code == 200 for status_code, _ in answers.values()) else 1)
