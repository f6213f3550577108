"""`outrider top`: shows load, memory, speculation and the last errors of a running stack, every second."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from outrider.services.clients.rest import RestClient
from outrider.services.terminal.charts import ChartHistory
from outrider.services.terminal.keys import typed_keys
from outrider.services.terminal.scrolled import Scrolled
from outrider.services.terminal.status_panels import render
from outrider.shared.base.errors import ErrorCode, OutriderError

STATUS = "/status.json"
FATAL = (ErrorCode.UNAUTHENTICATED, ErrorCode.NOT_FOUND)


def run_top(client: RestClient, interval_s: float, once: bool, as_json: bool) -> None:
    """Run `outrider top`: show the status of a gateway until the user presses q or Ctrl-C, or once.

    Args:
        client: Client of the gateway.
        interval_s: Seconds between two requests for the status.
        once: True to show one status and return. The same happens if standard output is not a terminal.
        as_json: True to print each status as one line of JSON.

    Raises:
        OutriderError: The first request fails, or the gateway refuses the API key.
    """
    status = client.get_json(STATUS)
    console = Console(highlight=False)
    if once or not (as_json or sys.stdout.isatty()):
        print(json.dumps(status)) if as_json else console.print(render(status))
        return
    try:
        if as_json:
            while True:
                print(json.dumps(status), flush=True)
                time.sleep(interval_s)
                status = client.get_json(STATUS)
        _live(client, status, interval_s, console)
    except KeyboardInterrupt:
        return


def _live(client: RestClient, status: dict[str, Any], interval_s: float, console: Console) -> None:
    before: dict[str, Any] | None = None
    history = ChartHistory()
    with (
        typed_keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        view = Scrolled("q quits" if keys.are_read else "Ctrl-C quits", keys.are_read)
        view.content = render(status, None, history)
        due = time.monotonic() + interval_s
        while True:
            live.update(view, refresh=True)
            for key in keys.pressed(due - time.monotonic()):
                if key in ("q", "Q"):
                    return
                view.press(key)
            if time.monotonic() < due:
                continue
            try:
                before, status = status, client.get_json(STATUS)
                history.add(status, before)
                view.content, view.message = render(status, before, history), None
            except OutriderError as error:
                if error.code in FATAL:
                    raise
                view.message = error.message
            due = time.monotonic() + interval_s
