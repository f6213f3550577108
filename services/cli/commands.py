"""The `outrider` command. Heavy parts are imported by the command that needs them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outrider.bench.cli import bench
from outrider.services.cli import entrypoints
from outrider.services.cli.flags import with_target_flags
from outrider.services.convert.cli import convert
from outrider.services.doctor.cli import doctor
from outrider.services.stack import launch
from outrider.services.stack.launch import Progress
from outrider.services.stack.options import DEMO_DRAFT, DEMO_TARGET, StackOptions, Transport
from outrider.services.stack.supervisor import Echo
from outrider.shared.base.errors import ErrorCode, OutriderError
from outrider.shared.spec.algorithm import Algorithm

app = typer.Typer(
    name="outrider",
    help="Serve large language models with speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    # The boxed help cuts long flag names off.
    rich_markup_mode=None,
)
serve = typer.Typer(
    help="Run one service in the foreground. `outrider serve SERVICE --help` lists its settings.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(serve, name="serve")
app.command()(doctor)
app.add_typer(convert, name="convert")
app.add_typer(bench, name="bench")

# The flags of a service come from its settings class, which is imported only once the service is known.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

TargetDir = Annotated[
    Path | None,
    typer.Option(
        "--target",
        help="Model folder in Hugging Face layout.",
        show_default="the embedded demo model",
        metavar="DIR",
    ),
]
DraftDir = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "--speculative-draft-model-path",
        help="Folder of the draft head or draft model, or `none`: no speculation unless --speculative-algorithm says what drafts.",
        show_default="the embedded head; none with another --target",
        metavar="DIR|none",
    ),
]
SpeculativeAlgorithm = Annotated[
    Algorithm,
    typer.Option(
        "--speculative-algorithm",
        case_sensitive=False,
        help="How to draft; auto: what the checkpoint shows. EAGLE or MTP without a --draft: the target's own MTP layers.",
    ),
]
TokenMap = Annotated[
    Path | None,
    typer.Option(
        "--speculative-token-map",
        help="FR-Spec: file of the token ids to draft (.pt, .safetensors, .json).",
        metavar="FILE",
    ),
]
NgramCorpus = Annotated[
    Path | None,
    typer.Option(
        "--ngram-corpus",
        help="NGRAM: further texts, .json or .jsonl of token ids or texts, or a text a line.",
        metavar="FILE",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
Dtype = Annotated[str, typer.Option(help="auto (bf16 on CUDA, fp32 on CPU), float32, bfloat16, float16.")]
NumSteps = Annotated[
    int | None,
    typer.Option("--num-steps", "--speculative-num-steps", help="Depth of drafting.", show_default="5"),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--topk", "--speculative-eagle-topk", help="Branches per step; 1 is a chain.", show_default="4"
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        "--speculative-num-draft-tokens",
        help="Nodes verified per round, root included.",
        show_default="16",
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--speculative-max-steps", help="Deepest tree that a request may ask for.", show_default="16"
    ),
]
MaxTopK = Annotated[
    int | None,
    typer.Option(
        "--speculative-max-topk", help="Widest branching that a request may ask for.", show_default="16"
    ),
]
MaxNodes = Annotated[
    int | None,
    typer.Option(
        "--speculative-max-nodes", help="Largest tree that a request may ask for.", show_default="128"
    ),
]
MaxRunningRequests = Annotated[
    int | None, typer.Option(help="Sequences that are worked on at once.", show_default="16")
]
MemFractionStatic = Annotated[
    float | None,
    typer.Option(
        help="Share of the GPU's memory for weights and KV cache, the draft's included.", show_default="0.85"
    ),
]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp",
        "--tensor-parallel-size",
        help="GPUs that share the target (processes, on a CPU).",
        show_default="1",
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="Size of the KV caches of target and draft in tokens.", show_default="what the memory allows"
    ),
]
Url = Annotated[str, typer.Option(help="Address of the gateway.")]
ApiKey = Annotated[str | None, typer.Option(help="Key to send, if the gateway wants one.")]
Speculation = Annotated[
    str | None, typer.Option("--speculation", help="auto, on or off.", show_default="the server's: auto")
]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[
    int | None, typer.Option(help="Makes sampling repeatable.", show_default="drawn by the server")
]


@app.command()
@with_target_flags
def up(
    target: TargetDir = None,
    draft: DraftDir = None,
    algorithm: SpeculativeAlgorithm = Algorithm.AUTO,
    token_map: TokenMap = None,
    ngram_corpus: NgramCorpus = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    num_steps: NumSteps = None,
    topk: TopK = None,
    num_draft_tokens: NumDraftTokens = None,
    max_steps: MaxSteps = None,
    max_topk: MaxTopK = None,
    max_nodes: MaxNodes = None,
    max_running_requests: MaxRunningRequests = None,
    mem_fraction_static: MemFractionStatic = None,
    kv_tokens: KvTokens = None,
    tp: Tp = None,
    host: Annotated[str, typer.Option(help="Where the gateway listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="REST port; gRPC takes the next one.")] = 8000,
    skip_tokenizer: Annotated[bool, typer.Option("--skip-tokenizer", help="Serve token ids only.")] = False,
    transport: Annotated[
        Transport,
        typer.Option(
            help="auto puts the draft into the target's process on a machine with one GPU, else runs it apart."
        ),
    ] = Transport.AUTO,
    mps: Annotated[
        bool,
        typer.Option("--mps", help="Share the GPU by NVIDIA's multi-process service; the draft runs apart."),
    ] = False,
    log_level: Annotated[str, typer.Option(help="Of all services.")] = "info",
    **target_flags: Any,
) -> None:
    """Start gateway, target and draft, restart what dies, and stop all on Ctrl-C or SIGTERM."""
    from outrider.shared.base.lifecycle import StopSignal

    options = StackOptions(
        target=target or DEMO_TARGET,
        draft=_draft_folder(target, draft, algorithm),
        algorithm=algorithm,
        token_map=token_map,
        ngram_corpus=ngram_corpus,
        device=device,
        dtype=dtype,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        max_steps=max_steps,
        max_topk=max_topk,
        max_nodes=max_nodes,
        max_running_requests=max_running_requests,
        mem_fraction_static=mem_fraction_static,
        kv_tokens=kv_tokens,
        tp=tp,
        host=host,
        port=port,
        skip_tokenizer=skip_tokenizer,
        transport=transport,
        mps=mps,
        log_level=log_level,
        target_flags={name: value for name, value in target_flags.items() if value is not None},
    )
    console = StatusConsole(stderr=True, highlight=False)
    with (
        StopSignal() as stop,
        launch.running_stack(
            options, _echo_to(console), _progress_to(console), lambda: stop.requested
        ) as stack,
    ):
        console.print(
            f"[bold green]up[/] {stack.url}  (OpenAI API at {stack.url}/v1; gRPC on port {port + 1})",
            soft_wrap=True,
        )
        stop.wait()
        console.print("stopping")


class StatusConsole(Console):
    """Goes quiet when nobody reads any more, instead of ending the thread that looks after a child."""

    def on_broken_pipe(self) -> None:
        """See `Console.on_broken_pipe`."""
        self.quiet = True


def _draft_folder(
    target: Path | None, draft: str | None, algorithm: Algorithm = Algorithm.AUTO
) -> Path | None:
    """The embedded head fits the embedded model only, and is an EAGLE-3 head: all else needs its own, or none."""
    if draft is None:
        return DEMO_DRAFT if target is None and algorithm in (Algorithm.AUTO, Algorithm.EAGLE3) else None
    return None if draft == "none" else Path(draft)


def _echo_to(console: Console) -> Echo:
    colours = {"gateway": "cyan", "target": "magenta", "draft": "yellow"}

    def echo(name: str, line: str) -> None:
        console.print(Text.assemble((f"{name:>7} | ", colours.get(name, "white")), line), soft_wrap=True)

    return echo


def _progress_to(console: Console) -> Progress:
    return lambda line: console.print(f"[green]{line}[/]")


@serve.command("gateway", context_settings=PASS_ON)
def serve_gateway(context: typer.Context) -> None:
    """The front door: REST and gRPC. Needs no torch."""
    from outrider.services.gateway.settings import GatewaySettings

    _run_service("gateway", GatewaySettings, entrypoints.serve_gateway, context.args)


@serve.command("target", context_settings=PASS_ON)
def serve_target(context: typer.Context) -> None:
    """The model: KV cache, batching, verification."""
    from outrider.services.target.settings import TargetSettings

    _run_service("target", TargetSettings, entrypoints.serve_target, context.args)


@serve.command("draft", context_settings=PASS_ON)
def serve_draft(context: typer.Context) -> None:
    """The draft head: proposes token trees."""
    from outrider.services.draft.settings import DraftSettings

    _run_service("draft", DraftSettings, entrypoints.serve_draft, context.args)


def _run_service(name: str, settings_type: Any, run: Any, arguments: list[str]) -> None:
    from outrider.services.cli.settings_options import settings_command

    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    inner.command()(settings_command(settings_type, run, f"Run the {name} service."))
    inner(args=arguments, prog_name=f"outrider serve {name}", standalone_mode=True)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads standard input.")],
    url: Url = "http://127.0.0.1:8000",
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")
    ] = False,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    speculation: Speculation = None,
    api_key: ApiKey = None,
) -> None:
    """Answer one prompt through a running gateway."""
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


@app.command()
def chat(
    url: Url = "http://127.0.0.1:8000",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    speculation: Speculation = None,
    api_key: ApiKey = None,
) -> None:
    """Talk to the model; an empty line or Ctrl-D ends."""
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
        f"[dim]{reply.completion_tokens} tokens, {reply.tokens_per_s:.0f}/s, {reply.finish_reason}{speculated}[/]"
    )


@app.command()
def health(
    url: Url = "http://127.0.0.1:8000",
    grpc_address: Annotated[
        str | None,
        typer.Option(
            "--grpc",
            help="Ask the service at this address (host:port, unix:/path or ipc:///path) instead.",
            metavar="ADDRESS",
        ),
    ] = None,
    service: Annotated[str, typer.Option(help="gRPC service name to ask for.")] = "",
) -> None:
    """Say whether a stack (or one gRPC service) can take requests; exit code 0 if so."""
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


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="What to ask.")] = "List 3 countries and their capitals.",
    device: Device = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens per measuring run.")] = 160,
) -> None:
    """Serve the embedded pair in three processes, answer a prompt, and measure speculation on and off side by side."""
    from outrider.services.stack.demo import run_demo

    _leave_on_terminate()
    raise typer.Exit(run_demo(prompt, device, tokens))


def _leave_on_terminate() -> None:
    """Turn SIGTERM into an ordinary exit, so that the stack in hand is stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


EXIT_CODES = {ErrorCode.INVALID_ARGUMENT: 2, ErrorCode.CANCELLED: 130}


def main() -> None:
    """Run the command line; an `OutriderError` becomes its message and an exit code (2: wrong input, 1: anything else)."""
    try:
        app()
    except OutriderError as error:
        Console(stderr=True, highlight=False).print(
            Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True
        )
        sys.exit(EXIT_CODES.get(error.code, 1))
    except KeyboardInterrupt:
        sys.exit(130)
