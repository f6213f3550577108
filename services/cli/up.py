"""`outrider up`: declares its flags, starts the services, and prints their output with coloured prefixes."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outrider.services.cli.flags import TARGET_FLAGS, target_options, with_options
from outrider.services.cli.settings_options import settings_options
from outrider.services.cli.up_help import ConfigFile, Profile
from outrider.services.doctor.cli import DraftRevision, Revision
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.hub.pair import demo_name, pair_folders
from outrider.services.stack import launch
from outrider.services.stack.launch import OnStage
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.start_bar import StartBar
from outrider.services.stack.supervisor import Echo
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import Algorithm

# `up` has its own options for these settings of the gateway, or sets the settings itself.
OWN_GATEWAY_SETTINGS = (
    *("host", "published_on", "port", "grpc_port"),
    *("target", "target_refresh_s", "target_wait_s", "tokenizer", "model_tokenizer", "log_level", "log_json"),
    # The services of `up` connect through unix sockets.
    *("peer_tls_cert", "peer_tls_key", "peer_tls_ca", "peer_token_file"),
)
GATEWAY_PREFIX = "OUTRIDER_GATEWAY_"
Model = Annotated[
    Path | None,
    typer.Argument(help="The target model; same as --target.", show_default=False, metavar="MODEL"),
]
TargetDir = Annotated[
    Path | None,
    typer.Option(
        "--target",
        "--model",
        "--model-path",
        help="Target model: a folder in Hugging Face layout, or ORG/NAME on the Hugging Face hub. A model of "
        "the hub is downloaded into its cache, unless the cache contains it.",
        show_default="the embedded demo model",
        metavar="DIR|ORG/NAME",
    ),
]
DraftDir = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "--speculative-draft-model-path",
        help="Draft head or draft model: a folder, or ORG/NAME on the hub. `none` disables speculation, "
        "unless --speculative-algorithm names a method that needs no folder.",
        show_default="the embedded head; none with another --target",
        metavar="DIR|ORG/NAME|none",
    ),
]
SpeculativeAlgorithm = Annotated[
    Algorithm,
    typer.Option(
        "--speculative-algorithm",
        case_sensitive=False,
        help="Drafting method. `auto` detects it from the draft's checkpoint. `eagle` and `mtp` without a "
        "--draft use the target's own MTP layers.",
    ),
]
TokenMap = Annotated[
    Path | None,
    typer.Option(
        "--speculative-token-map",
        help="FR-Spec token map: file with the ids of the tokens that may be drafted (.pt, .safetensors or "
        ".json).",
        metavar="FILE",
    ),
]
NgramCorpus = Annotated[
    Path | None,
    typer.Option(
        "--ngram-corpus",
        help="With NGRAM: additional texts to draft from. A .json or .jsonl file of token ids or texts, or a "
        "file with one text per line.",
        metavar="FILE",
    ),
]
Device = Annotated[str, typer.Option(help="Device to run on: auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Data type of the weights: auto (bfloat16 on CUDA, float32 on a CPU), float32, bfloat16 or "
        "float16."
    ),
]
NumSteps = Annotated[
    int | None,
    typer.Option("--num-steps", "--speculative-num-steps", help="Depth of the draft tree.", show_default="5"),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--topk",
        "--speculative-eagle-topk",
        help="Branches per level of the draft tree; 1 drafts a chain.",
        show_default="4",
    ),
]
NumDraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        "--speculative-num-draft-tokens",
        help="Nodes verified per round, including the root.",
        show_default="16",
    ),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        "--speculative-max-steps", help="Maximum tree depth that a request may ask for.", show_default="16"
    ),
]
MaxTopK = Annotated[
    int | None,
    typer.Option(
        "--speculative-max-topk",
        help="Maximum branches per level that a request may ask for.",
        show_default="16",
    ),
]
MaxNodes = Annotated[
    int | None,
    typer.Option(
        "--speculative-max-nodes",
        help="Maximum number of tree nodes that a request may ask for.",
        show_default="128",
    ),
]
MaxRunningRequests = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of sequences that run at the same time.",
        show_default="as many as memory allows, 16 to 256; 16 on a CPU",
    ),
]
MemFractionStatic = Annotated[
    float | None,
    typer.Option(
        help="Fraction of GPU memory for the weights and KV caches of the target and the draft.",
        show_default="0.85",
    ),
]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp",
        "--tensor-parallel-size",
        help="Number of GPUs that share the target (number of processes on a CPU).",
        show_default="1",
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        help="Size of the KV cache in tokens; the target and the draft use the same number.",
        show_default="as large as memory allows",
    ),
]


@with_options([*target_options(), *settings_options(GatewaySettings, OWN_GATEWAY_SETTINGS)])
def up(
    context: typer.Context,
    model: Model = None,
    target: TargetDir = None,
    draft: DraftDir = None,
    revision: Revision = None,
    draft_revision: DraftRevision = None,
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
    config: ConfigFile = None,
    profile: Profile = None,
    host: Annotated[str, typer.Option(help="Address that the gateway listens on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the REST API.")] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option(help="Port of the gRPC API; 0 disables it.", show_default="the port after --port"),
    ] = None,
    skip_tokenizer: Annotated[
        bool,
        typer.Option(
            "--skip-tokenizer", help="Run without a tokenizer; requests and answers then use token ids only."
        ),
    ] = False,
    transport: Annotated[
        Transport,
        typer.Option(
            help="How the target reaches the draft. `auto` runs the draft in the target's process on a GPU, "
            "with --tp, and for n-grams. It uses an idle second GPU, over ipc, only where that is known to "
            "be as fast. On a CPU, the draft has its own process."
        ),
    ] = Transport.AUTO,
    draft_device: Annotated[
        str,
        typer.Option(
            help="Device of a draft with its own process: auto, cpu, cuda or cuda:N. `auto` prefers an idle "
            "GPU."
        ),
    ] = "auto",
    mps: Annotated[
        bool,
        typer.Option(
            "--mps",
            help="Share the GPU through NVIDIA's multi-process service (MPS). The draft then runs in its own "
            "process.",
        ),
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby/--no-standby",
            help="Keep a second draft process with imported code, which takes over if the draft's process "
            "exits. It uses memory of the host but not of the GPU.",
        ),
    ] = True,
    log_level: Annotated[
        str, typer.Option(help="Log level of all services: debug, info, warning or error.")
    ] = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Write each log line of the services as a JSON object.")
    ] = False,
    **settings: Any,
) -> None:
    """Start the gateway, the target and the draft.

    A service that exits unexpectedly is restarted. Ctrl-C or SIGTERM stops all services.
    """
    from outrider.shared.base.lifecycle import StopSignal
    from outrider.shared.obs.queued_stream import queue_stderr

    queue_stderr(json_service="up" if log_json else None)

    if model is not None and target is not None:
        raise ConfigurationError(
            f"The model is given twice: {model} and --target {target}. Remove one.", field="--target"
        )
    target = model or target
    target_folder, draft_folder = pair_folders(target, draft, algorithm, revision, draft_revision)
    options = StackOptions(
        target=target_folder,
        model_id=demo_name(target),
        draft=draft_folder,
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
        draft_device=draft_device,
        mps=mps,
        standby=standby,
        log_level=log_level,
        target_settings={name: settings[name] for name in TARGET_FLAGS if settings[name] is not None},
        gateway_settings=_gateway_settings(context, settings),
        grpc_port=grpc_port,
        log_json=log_json,
    )
    # With JSON logs, the lines of the services are enough.
    console = StatusConsole(stderr=True, highlight=False, quiet=log_json)
    lines = StatusConsole(stderr=True, highlight=False)
    if _source(context, "api_key") == "COMMANDLINE":
        console.print(
            "[yellow]--api-key shows in the list of processes (ps). Set OUTRIDER_GATEWAY_API_KEY instead.[/]",
            soft_wrap=True,
        )
    echo, progress = _echo_to(lines, log_json), _progress_to(lines, log_json)
    bar = StartBar(Console(file=io.StringIO()) if log_json else lines, progress)

    def heard(name: str, line: str) -> None:
        echo(name, line)
        bar.hear(name, line)

    def told(line: str) -> None:
        progress(line)
        bar.tell(line)

    with StopSignal() as stop, ExitStack() as cleanup:
        with bar:
            running = launch.running_stack(options, heard, told, lambda: stop.requested)
            stack = cleanup.enter_context(running)
        console.print(
            f"[bold green]up[/] {stack.url}  (OpenAI API at {stack.url}/v1"
            + (f"; gRPC on port {options.grpc})" if options.grpc else ")"),
            soft_wrap=True,
        )
        if GatewaySettings.load(dict(options.gateway_settings)).playground:
            console.print(f"[bold green]playground[/] {stack.url}/", soft_wrap=True)
        stop.wait()
        console.print("stopping")


class StatusConsole(Console):
    """A rich console that prints nothing more after its output pipe is closed.

    By default, a rich console raises SystemExit instead. This exception would end the thread that supervises
    a child process.
    """

    def on_broken_pipe(self) -> None:
        """Silence the console."""
        self.quiet = True


def _gateway_settings(context: typer.Context, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gateway's settings from flags and --config. The gateway's environment overrides the file."""
    return {
        name: value
        for name, value in settings.items()
        if name not in TARGET_FLAGS
        and value not in (None, [])
        and not (_source(context, name) == "DEFAULT_MAP" and f"{GATEWAY_PREFIX}{name.upper()}" in os.environ)
    }


def _source(context: typer.Context, name: str) -> str:
    """Return where an option's value comes from: COMMANDLINE, DEFAULT_MAP (--config) or DEFAULT."""
    source = context.get_parameter_source(name)
    return source.name if source is not None else ""


def _echo_to(console: Console, log_json: bool) -> Echo:
    colours = {"gateway": "cyan", "target": "magenta", "draft": "yellow"}

    def echo(name: str, line: str) -> None:
        if log_json:
            # Objects that the services log stay as they are. Other lines become objects, too.
            text = line if line.startswith("{") else json.dumps({"service": name, "event": line})
            console.print(Text(text), soft_wrap=True)
            return
        console.print(Text.assemble((f"{name:>7} | ", colours.get(name, "white")), line), soft_wrap=True)

    return echo


def _progress_to(console: Console, log_json: bool) -> OnStage:
    if log_json:
        return lambda line: _echo_to(console, log_json)("up", line)
    return lambda line: console.print(f"[green]{line}[/]", soft_wrap=True)
