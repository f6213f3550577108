"""The `outrider` command: assembles its subcommands, runs them, and turns errors into exit codes.

Each command imports its heavy dependencies when it runs, so that `outrider --help` loads neither torch nor
gRPC.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outrider.bench.cli import bench
from outrider.services.cli import entrypoints
from outrider.services.cli.client_commands import chat, generate, health, top
from outrider.services.cli.info import info
from outrider.services.cli.up import Device, up
from outrider.services.cli.up_help import GroupedCommand
from outrider.services.convert.cli import convert
from outrider.services.doctor.cli import doctor
from outrider.services.stack.standby import wait_until_needed
from outrider.services.tune.cli import tune
from outrider.services.verify.cli import verify
from outrider.shared.base.errors import ErrorCode, OutriderError

# grpc's own log contains unescaped text from peers. grpc reads this variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

app = typer.Typer(
    name="outrider",
    help="Serve large language models with speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    # rich's boxed help truncates long flag names.
    rich_markup_mode=None,
)
serve = typer.Typer(
    help="Run one service in the foreground. `outrider serve SERVICE --help` lists its settings.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command(cls=GroupedCommand)(up)
app.command()(generate)
app.command()(chat)
app.command()(top)
app.command()(health)
app.command()(info)
app.command()(doctor)
app.command()(verify)
app.command()(tune)
app.add_typer(serve, name="serve")
app.add_typer(convert, name="convert")
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        from outrider.shared.base.version import installed_version

        typer.echo(f"outrider {installed_version()}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Serve large language models with speculative decoding."""


# The flags of a service come from its settings class, which is imported only after the service is chosen.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
EXIT_CODES = {ErrorCode.INVALID_ARGUMENT: 2, ErrorCode.CANCELLED: 130}


@serve.command("gateway", context_settings=PASS_ON)
def serve_gateway(context: typer.Context) -> None:
    """The REST and gRPC front end; needs no torch."""
    from outrider.services.gateway.settings import GatewaySettings

    _run_service("gateway", GatewaySettings, entrypoints.run_gateway, context.args)


@serve.command("target", context_settings=PASS_ON)
def serve_target(context: typer.Context) -> None:
    """The model: KV cache, batching, verification."""
    from outrider.services.target.settings import TargetSettings

    _run_service("target", TargetSettings, entrypoints.run_target, context.args)


@serve.command("draft", context_settings=PASS_ON)
def serve_draft(context: typer.Context) -> None:
    """The drafter: proposes token trees to the target."""
    wait_until_needed(entrypoints.import_draft)
    from outrider.services.draft.settings import DraftSettings

    _run_service("draft", DraftSettings, entrypoints.run_draft, context.args)


def _run_service(name: str, settings_type: Any, run: Any, arguments: list[str]) -> None:
    from outrider.services.cli.settings_options import settings_command
    from outrider.shared.obs.queued_stream import queue_stderr

    queue_stderr()
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    inner.command()(settings_command(settings_type, run, f"Run the {name} service."))
    inner(args=arguments, prog_name=f"outrider serve {name}", standalone_mode=True)


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(help="Prompt to answer.")] = "List 3 countries and their capitals.",
    device: Device = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens to generate per measured run.")] = 160,
) -> None:
    """Try out the embedded models.

    Start all three services, answer a prompt, and measure the speed with and without speculation.
    """
    from outrider.services.stack.demo import run_demo

    _leave_on_terminate()
    raise typer.Exit(run_demo(prompt, device, tokens))


def _leave_on_terminate() -> None:
    """Turn SIGTERM into an ordinary exit, so that the running services are stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> None:
    """Run the command line.

    Prints the message of an `OutriderError` and exits with 2 (invalid input), 130 (cancelled) or 1 (any other
    error).
    """
    try:
        app()
    except OutriderError as error:
        Console(stderr=True, highlight=False).print(
            Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True
        )
        sys.exit(EXIT_CODES.get(error.code, 1))
    except KeyboardInterrupt:
        sys.exit(130)
