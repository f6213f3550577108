"""The `outrider` command: assembles its subcommands, runs them, and turns errors into exit codes.

Each command imports its heavy dependencies when it runs, so that `outrider --help` loads neither torch nor
gRPC.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from outrider.bench.cli import bench
from outrider.services.cli.client_commands import chat, generate, health, top
from outrider.services.cli.info import info
from outrider.services.cli.run_app import run_app
from outrider.services.cli.serve import serve
from outrider.services.cli.up import Device, up
from outrider.services.cli.up_help import GroupedCommand
from outrider.services.convert.cli import convert
from outrider.services.doctor.cli import doctor
from outrider.services.tune.cli import tune
from outrider.services.verify.cli import verify

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
    from outrider.shared.base.lifecycle import leave_on_terminate

    leave_on_terminate()
    raise typer.Exit(run_demo(prompt, device, tokens))


def main() -> None:
    """Run the command line; see `run_app`."""
    run_app(app)
