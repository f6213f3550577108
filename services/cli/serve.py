"""`outrider serve gateway|target|draft`: runs one service in the foreground.

`outrider up` starts each service with this command. The module therefore imports little, so that a service
begins to load its own code early.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from outrider.services.cli import entrypoints, head_start
from outrider.services.cli.run_app import run_app
from outrider.services.stack.standby import wait_until_needed
from outrider.shared.base.garbage import without_collections

# grpc's own log contains unescaped text from peers. grpc reads this variable when it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

serve = typer.Typer(
    help="Run one service in the foreground. `outrider serve SERVICE --help` lists its settings.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
# The flags of a service come from its settings class, which is imported only after the service is chosen.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@serve.command("gateway", context_settings=PASS_ON)
def serve_gateway(context: typer.Context) -> None:
    """The REST and gRPC front end; needs no torch."""
    with without_collections():
        from outrider.services.gateway.settings import GatewaySettings

    _run_service("gateway", GatewaySettings, entrypoints.run_gateway, context.args)


@serve.command("target", context_settings=PASS_ON)
def serve_target(context: typer.Context) -> None:
    """The model: KV cache, batching, verification."""
    head_start.begin(context.args)
    with without_collections():
        from outrider.services.target.settings import TargetSettings

    _run_service("target", TargetSettings, entrypoints.run_target, context.args)


@serve.command("draft", context_settings=PASS_ON)
def serve_draft(context: typer.Context) -> None:
    """The drafter: proposes token trees to the target."""
    wait_until_needed(entrypoints.import_draft)
    head_start.begin(context.args)
    with without_collections():
        from outrider.services.draft.settings import DraftSettings

    _run_service("draft", DraftSettings, entrypoints.run_draft, context.args)


def serve_alone() -> None:
    """Run `outrider serve` on the arguments after the word `serve`."""
    del sys.argv[1]
    run_app(serve, "outrider serve")


def _run_service(name: str, settings_type: Any, run: Any, arguments: list[str]) -> None:
    from outrider.services.cli.settings_options import settings_command
    from outrider.shared.obs.queued_stream import queue_stderr

    queue_stderr()
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    inner.command()(settings_command(settings_type, run, f"Run the {name} service."))
    inner(args=arguments, prog_name=f"outrider serve {name}", standalone_mode=True)
