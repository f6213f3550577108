"""`outrider demo`: serves the embedded models, answers a prompt, and measures the gain from speculation."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.services.clients.rest import DEFAULT_URL, RestClient, StreamedReply
from outrider.services.clients.summary import speculation_summary
from outrider.services.hub.pair import demo_name
from outrider.services.stack.launch import free_port, outrider_command
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.started_services import started_services
from outrider.shared.obs.progress import Progress

REPEATS = 3


def run_demo(prompt: str, device: str, tokens: int) -> int:
    """Run the demo: start the services, stream one answer, and compare speeds with and without speculation.

    Args:
        prompt: The prompt to answer.
        device: Device in the services' notation. ``auto`` uses CUDA if there is a GPU.
        tokens: Length of each measured answer. An end-of-text token does not end an answer.

    Returns:
        The exit code.

    Raises:
        OutriderError: The services could not start or could not answer. The last lines of their output are
            printed to stderr first.
    """
    console = Console(highlight=False)
    options = StackOptions(
        model_id=demo_name(None),
        device=device,
        port=free_port(),
        transport=Transport.GRPC,
        why_transport="the demo shows all three services",
    )
    console.print("Starting gateway, target and draft on the embedded model pair …")

    def tell(line: str) -> None:
        console.print(f"  [dim]{line}[/]", soft_wrap=True)

    with started_services(options, console=console, tell=tell) as stack, RestClient(stack.url) as client:
        _answer(console, client, prompt)
        _measure(console, client, prompt, tokens)
    console.print("All services stopped.\n")
    console.print(
        f"Next: [bold]{_typed_command()} up[/] serves this pair. The playground is then at {DEFAULT_URL}/.",
        soft_wrap=True,
    )
    return 0


def _typed_command() -> str:
    """Return `outrider`, or the path of this command if the shell does not find it on the PATH."""
    if shutil.which("outrider"):
        return "outrider"
    command = outrider_command()
    relative = os.path.relpath(command)
    return command if relative.startswith("..") else relative


def _answer(console: Console, client: RestClient, prompt: str) -> None:
    console.print(f"\n[bold]> {prompt}[/]")
    reply = StreamedReply()
    options = {"temperature": 0, "max_tokens": 200, "speculation": {"mode": "on"}}
    for piece in client.stream_chat([{"role": "user", "content": prompt}], options, reply):
        sys.stdout.write(piece)
        sys.stdout.flush()
    console.print(f"\n\n  {speculation_summary(reply)}", soft_wrap=True)


def _measure(console: Console, client: RestClient, prompt: str, tokens: int) -> None:
    """Print the median speed with and without speculation.

    The runs alternate, so that a change in the machine's load affects all measurements alike.
    """
    runs: dict[str, list[StreamedReply]] = {"on": [], "off": []}
    options: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    with Progress("measuring", REPEATS * len(runs)) as progress:
        for _ in range(REPEATS):
            for mode, replies in runs.items():
                reply = StreamedReply()
                for _piece in client.stream_chat(
                    [{"role": "user", "content": prompt}], options | {"speculation": {"mode": mode}}, reply
                ):
                    pass
                replies.append(reply)
                progress.advance(step=f"speculation {mode}")
    speeds = {
        mode: statistics.median(reply.tokens_per_s for reply in replies) for mode, replies in runs.items()
    }
    table = Table(title=f"{tokens} tokens, batch 1, median of {REPEATS} alternating runs")
    for heading in ("speculation", "tokens/s", "accept length", "rounds"):
        table.add_column(heading, justify="right")
    for mode, replies in runs.items():
        speculation = replies[-1].speculation
        accept_length = f"{speculation['accept_length']:.2f}" if mode == "on" else "-"
        table.add_row(mode, f"{speeds[mode]:.0f}", accept_length, str(speculation["rounds"]))
    console.print(table)
    console.print(f"Speculation made it [bold]{speeds['on'] / speeds['off']:.2f} ×[/] as fast.")
    if runs["on"][-1].text != runs["off"][-1].text:
        console.print(
            "The two answers differ where two tokens were almost equally likely (see docs/numerics.md)."
        )
