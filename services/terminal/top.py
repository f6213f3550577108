"""`outrider top`: shows load, memory, speculation and the last errors of a running stack, every second."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.services.clients.rest import RestClient
from outrider.services.terminal.keys import typed_keys
from outrider.services.terminal.reasons import chosen, draft_state, why_decided, why_no_draft
from outrider.shared.base.errors import ErrorCode, OutriderError

STATUS = "/status.json"
SHOWN_ERRORS = 5
SHOWN_DEPTHS = 6
NO_DRAFT = 'outrider_draft_fallback_total{reason="'
LABEL_END = '"}'
TRANSPORTS = {"inproc": "in process", "ipc": "IPC", "grpc": "gRPC"}
REFRESH_S = 0.1
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
        print(json.dumps(status)) if as_json else console.print(render(status, None))
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
    with (
        typed_keys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        hint = Text("q quits" if keys.are_read else "Ctrl-C quits", "dim")
        live.update(Group(render(status, None), hint), refresh=True)
        while not keys.pressed("qQ", interval_s):
            try:
                before, status = status, client.get_json(STATUS)
                live.update(Group(render(status, before), hint), refresh=True)
            except OutriderError as error:
                if error.code in FATAL:
                    raise
                message = Text(error.message, "bold red")
                live.update(Group(render(status, before), message, hint), refresh=True)


def render(status: Mapping[str, Any], before: Mapping[str, Any] | None) -> RenderableType:
    """Return the panels of one status. `before` is the previous status, for rates."""
    target = status["target"]
    panels = Table.grid(expand=True, padding=(0, 1))
    panels.add_column(ratio=1)
    panels.add_column(ratio=1)
    panels.add_row(_panel("Services", _services(status)), _panel("Load", _load(status, before)))
    panels.add_row(_panel("KV cache", _memory(status)), _panel("Speculation", _speculation(status, before)))
    panels.add_row(_panel("Memory and graphs", _resources(status)), _panel("Acceptance", _depths(status)))
    model = status["model"]
    title = f"{', '.join(model['names'])} on {model['device']}, {model['dtype']}" if model else "no target"
    parts: list[RenderableType] = [Text.assemble(("outrider top  ", "bold"), (title, "dim")), panels]
    if decided := _decision(status):
        parts.append(_panel("What the controller chose", decided))
    if len(status.get("targets", ())) > 1:
        parts.append(_panel("Targets", _targets(status["targets"])))
    if status["errors"]:
        parts.append(_panel("Last errors", _errors(status["errors"])))
    if target is None:
        parts.append(Text("No target answers.", "bold red"))
    return Group(*parts)


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


def _pairs(*rows: tuple[str, object]) -> Table:
    table = Table.grid(expand=True)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, "–" if value is None else str(value))
    return table


def _services(status: Mapping[str, Any]) -> Table:
    target, targets = status["target"], status.get("targets", ())
    several = f"{sum(one['ready'] for one in targets)} of {len(targets)} ready"
    return _pairs(
        ("gateway", "draining" if status["draining"] else f"version {status['version']}"),
        ("targets", several) if len(targets) > 1 else ("target", "ready" if target else "not ready"),
        ("draft", draft_state(target["draft"]["state"]) if target else "unknown"),
        ("gateway up for", duration(status["uptime_s"])),
        ("target up for", _uptime(target)),
        ("draft up for", _uptime(target["draft"] if target else None)),
        ("lost connections", _lost(target, targets)),
    )


def _uptime(service: Mapping[str, Any] | None) -> str | None:
    seconds = service.get("uptime_s") if service else None
    return None if seconds is None else duration(seconds)


def _lost(target: Mapping[str, Any] | None, targets: Sequence[Mapping[str, Any]]) -> str:
    """Return how often the gateway lost a target, and how often the target lost its draft."""
    counts = {
        "target": sum(one.get("connections_lost", 0) for one in targets),
        "draft": target["draft"].get("connections_lost", 0) if target else 0,
    }
    return ", ".join(f"{name} {count} ×" for name, count in counts.items() if count) or "none"


def duration(seconds: float) -> str:
    """Return a duration in words: `58 s`, `7 min`, `3 h 5 min` or `2 d 4 h`. Smaller units are cut off.

    The operator's page writes durations in the same form.
    """
    minutes = int(seconds) // 60
    hours = minutes // 60
    if minutes < 1:
        return f"{int(seconds)} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _targets(targets: list[dict[str, Any]]) -> Table:
    table = Table(box=None, expand=True, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("address", ratio=1)
    for title in ("model", "state", "running", "waiting", "pages in use", "accept length", "draft"):
        table.add_column(title, no_wrap=True)
    for one in targets:
        cells = ["–"] * 5
        if stats := one["stats"]:
            pages, length = stats["kv_pages"], stats["accept_length"]
            cells = [
                f"{stats['running']} of {stats['max_running_requests']}",
                str(stats["waiting"]),
                _percent(1 - pages["free"] / pages["total"]) if pages["total"] else "–",
                f"{length:.2f}" if length else "–",
                draft_state(stats["draft"]["state"]),
            ]
        state = Text("ready") if one["ready"] else Text("not ready", "bold red")
        table.add_row(one["address"], one["model"] or "–", state, *cells)
    return table


def _load(status: Mapping[str, Any], before: Mapping[str, Any] | None) -> Table:
    target, gateway = status["target"], status["gateway"]
    speed = None
    if target and before and before["target"] and status["at"] > before["at"]:
        tokens = target["generated_tokens"] - before["target"]["generated_tokens"]
        speed = f"{max(0, tokens) / (status['at'] - before['at']):.0f}"
    return _pairs(
        ("tokens/s", speed),
        ("running", f"{target['running']} of {target['max_running_requests']}" if target else None),
        ("waiting in the target", target["waiting"] if target else None),
        ("waiting in the gateway", f"{gateway['waiting']} of {gateway['max_queued_requests']}"),
        ("prompt tokens waiting", f"{gateway.get('waiting_prompt_tokens', 0):,}"),
        ("generated tokens", _count(status["metrics"], "generation_tokens_total")),
    )


def _memory(status: Mapping[str, Any]) -> Table:
    target, metrics = status["target"], status["metrics"]
    pages = target["kv_pages"] if target else None
    used = pages["total"] - pages["free"] if pages else 0
    return _pairs(
        ("pages in use", f"{used:,} of {pages['total']:,}" if pages else None),
        ("committed tokens", _count(metrics, 'kv_cache_tokens{kind="committed"}')),
        ("reserved tokens", _count(metrics, 'kv_cache_tokens{kind="reserved"}')),
        ("retractions", _count(metrics, "num_preemptions_total")),
        ("prompt tokens found", _found(metrics)),
    )


def _found(metrics: Mapping[str, float]) -> str | None:
    """Return the share of prompt tokens whose K/V was in the prefix cache."""
    queried = metrics.get("outrider_prefix_cache_queries_total", 0.0)
    return _percent(metrics.get("outrider_prefix_cache_hits_total", 0.0) / queried) if queried else None


def _percent(share: float, digits: int = 0) -> str:
    """Return a share in percent. The operator's page uses the same form."""
    return f"{100 * share:.{digits}f} %"


def _speculation(status: Mapping[str, Any], before: Mapping[str, Any] | None) -> Table:
    target, metrics = status["target"], status["metrics"]
    speedup = metrics.get("outrider_estimated_speedup")
    return _pairs(
        ("mode of requests that name none", status["gateway"].get("speculation_mode")),
        ("algorithm", (target["draft"]["algorithm"] or "none") if target else None),
        ("accept length", f"{target['accept_length']:.2f}" if target and target["accept_length"] else None),
        ("speed-up of recent drafted rounds", f"{speedup:.2f} ×" if speedup else None),
        ("draft time per round", _mean_ms("draft_seconds", metrics, before)),
        ("verify time per pass", _mean_ms("verify_seconds", metrics, before)),
    )


def _resources(status: Mapping[str, Any]) -> Table:
    used = (status["target"] or {}).get("resources")
    if not used:
        return _pairs(("target", None))
    gpu = f"{_size(used['gpu_used_bytes'])} of {_size(used['gpu_total_bytes'])}"
    return _pairs(
        ("weights", _size(used["weight_bytes"])),
        ("KV cache", _size(used["kv_bytes"])),
        ("process", _size(used["process_bytes"])),
        ("GPU", gpu if used["gpu_total_bytes"] else "none"),
        ("CUDA graphs", f"{used['graphs_recorded']} recorded, {used['graphs_left']} left"),
        ("memory of graphs", _size(used["graph_bytes"])),
        ("transport of drafts", _transport(used)),
    )


def _size(number: int) -> str | None:
    """Return a number of bytes in GiB or MiB, or None for 0. The operator's page uses the same form."""
    if not number:
        return None
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def _transport(used: Mapping[str, Any]) -> str:
    """Return how drafts reach the target, such as ``IPC, on the device``. Without a GPU, ``IPC``."""
    name = TRANSPORTS.get(used["draft_transport"])
    if name and not used["gpu_total_bytes"]:
        return name
    way = {True: ", on the device", False: ", through the host"}.get(used["draft_on_device"], "")
    return name + way if name else "no draft"


def _depths(status: Mapping[str, Any]) -> Table:
    """Return, for each depth, the share of the rounds drafted to this depth that accepted it."""
    metrics: Mapping[str, float] = status["metrics"]
    shares: list[float] = []
    drafts = metrics.get("outrider_spec_decode_num_drafts_total", 0.0)
    while accepted := metrics.get(f'outrider_accepted_tokens_total{{depth="{len(shares) + 1}"}}'):
        drafted = metrics.get(f'outrider_drafted_rounds_total{{depth="{len(shares) + 1}"}}', drafts)
        shares.append(accepted / drafted)
    rows = [(f"depth {depth}", _percent(share, 1)) for depth, share in enumerate(shares[:SHOWN_DEPTHS], 1)]
    return _pairs(*rows) if rows else _pairs(("drafted rounds", None))


def _decision(status: Mapping[str, Any]) -> Table | None:
    """Return the controller's last decision and the rounds without a draft, in words."""
    auto = (status["target"] or {}).get("auto")
    missing = [
        f"{why_no_draft(name[len(NO_DRAFT) : -len(LABEL_END)])} ({count:,.0f})"
        for name, count in status["metrics"].items()
        if name.startswith(NO_DRAFT) and count
    ]
    rows = [("last choice", chosen(auto)), ("reason", why_decided(auto))] if auto else []
    if missing:
        rows.append(("rounds that got no draft", "; ".join(missing)))
    return _pairs(*rows) if rows else None


def _mean_ms(name: str, metrics: Mapping[str, float], before: Mapping[str, Any] | None) -> str | None:
    """Return the mean since `before`. If nothing has happened since then, return the mean since the start."""
    total, count = metrics.get(f"outrider_{name}_sum", 0.0), metrics.get(f"outrider_{name}_count", 0.0)
    if before:
        old = before["metrics"]
        recent = count - old.get(f"outrider_{name}_count", 0.0)
        if recent > 0:
            return f"{(total - old.get(f'outrider_{name}_sum', 0.0)) / recent * 1e3:.1f} ms"
    return f"{total / count * 1e3:.1f} ms" if count else None


def _count(metrics: Mapping[str, float], name: str) -> str | None:
    value = metrics.get(f"outrider_{name}")
    return None if value is None else f"{value:,.0f}"


def _errors(errors: list[dict[str, Any]]) -> Table:
    table = Table(box=None, expand=True, header_style="dim", padding=(0, 1, 0, 0))
    for title in ("time", "status", "reason", "count"):
        table.add_column(title, no_wrap=True)
    table.add_column("message", ratio=1)
    for one in errors[:SHOWN_ERRORS]:
        clock = time.strftime("%H:%M:%S", time.localtime(one["at"]))
        table.add_row(clock, str(one["status"]), one["reason"], str(one["count"]), Text(one["message"]))
    return table
