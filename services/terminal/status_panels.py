"""The panels of `outrider top`, with the same values as the operator's page at ``/status``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.services.terminal.charts import ChartHistory, charts, mean_ms, percent
from outrider.services.terminal.reasons import chosen, draft_state, why_decided, why_no_draft

NO_DRAFT = 'outrider_draft_fallback_total{reason="'
LABEL_END = '"}'
TRANSPORTS = {"inproc": "in process", "ipc": "IPC", "grpc": "gRPC"}
PANEL_WIDTH = 40
"""Narrowest panel, in cells. A wider terminal shows more panels side by side."""
MOST_COLUMNS = 4


def render(
    status: Mapping[str, Any], before: Mapping[str, Any] | None = None, history: ChartHistory | None = None
) -> RenderableType:
    """Return the panels of one status.

    Args:
        status: A reply of ``GET /status.json``.
        before: The previous reply, for rates. None shows rates since the start of the services.
        history: Values since the start of `outrider top`, for charts.
    """
    target, model = status["target"], status["model"]
    title = f"{', '.join(model['names'])} on {model['device']}, {model['dtype']}" if model else "no target"
    parts: list[RenderableType] = [Text.assemble(("outrider top  ", "bold"), (title, "dim"))]
    if target is None:
        parts.append(Text("No target answers.", "bold red"))
    parts.append(
        _Board(
            [
                ("Services", _services(status)),
                ("Load", _load(status, before)),
                ("Speculation", _speculation(status, before)),
                ("KV cache", _memory(status)),
                ("Memory and graphs", _resources(status)),
                ("Model", _model(model)),
                ("Acceptance by depth", _depths(status)),
            ]
        )
    )
    if decided := _decision(status):
        parts.append(_panel("What the controller chose", decided))
    if status.get("recent") or history is not None:
        parts.append(_panel("The last two minutes", charts(status, history)))
    if len(status.get("targets", ())) > 1:
        parts.append(_panel("Targets", _targets(status["targets"])))
    if status["errors"]:
        parts.append(_panel("Last errors", _errors(status["errors"])))
    return Group(*parts)


class _Board:
    """Panels in as many columns as fit. Each panel goes to the column that is shortest so far."""

    def __init__(self, panels: Sequence[tuple[str, Table]]) -> None:
        self._panels = panels

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns: list[list[Panel]] = [
            [] for _ in range(max(1, min(MOST_COLUMNS, options.max_width // PANEL_WIDTH)))
        ]
        heights = [0] * len(columns)
        for title, content in self._panels:
            shortest = heights.index(min(heights))
            columns[shortest].append(_panel(title, content))
            heights[shortest] += content.row_count + 2
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in columns:
            table.add_column(ratio=1)
        table.add_row(*(Group(*panels) for panels in columns))
        yield table


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
        ("gateway up for", short_duration(status["uptime_s"])),
        ("target up for", _uptime(target)),
        ("draft up for", _uptime(target["draft"] if target else None)),
        ("lost connections", _lost(target, targets)),
    )


def _uptime(service: Mapping[str, Any] | None) -> str | None:
    seconds = service.get("uptime_s") if service else None
    return None if seconds is None else short_duration(seconds)


def _lost(target: Mapping[str, Any] | None, targets: Sequence[Mapping[str, Any]]) -> str:
    """Return how often the gateway lost a target, and how often the target lost its draft."""
    counts = {
        "target": sum(one.get("connections_lost", 0) for one in targets),
        "draft": target["draft"].get("connections_lost", 0) if target else 0,
    }
    return ", ".join(f"{name} {count} ×" for name, count in counts.items() if count) or "none"


def _model(model: Mapping[str, Any] | None) -> Table:
    if model is None:
        return _pairs(("target", "does not answer"))
    return _pairs(
        ("architecture", model.get("architecture")),
        ("device", f"{model['device']}, {model['dtype']}"),
        ("context", _tokens(model.get("max_model_len"))),
        ("vocabulary", _number(model.get("vocab_size"))),
        ("weights", model.get("weight_version")),
    )


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _tokens(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f} tokens"


def short_duration(seconds: float) -> str:
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
                percent(1 - pages["free"] / pages["total"]) if pages["total"] else "–",
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
        ("prompt tokens waiting", _number(gateway.get("waiting_prompt_tokens"))),
        ("generated tokens", _count(status["metrics"], "generation_tokens_total")),
        ("retractions", _count(status["metrics"], "num_preemptions_total")),
    )


def _memory(status: Mapping[str, Any]) -> Table:
    target, metrics = status["target"], status["metrics"]
    pages = target["kv_pages"] if target else None
    used = pages["total"] - pages["free"] if pages else 0
    return _pairs(
        ("pages in use", f"{used:,} of {pages['total']:,}" if pages else None),
        ("committed tokens", _count(metrics, 'kv_cache_tokens{kind="committed"}')),
        ("reserved tokens", _count(metrics, 'kv_cache_tokens{kind="reserved"}')),
        ("prompt tokens found", _found(metrics)),
    )


def _found(metrics: Mapping[str, float]) -> str | None:
    """Return the share of prompt tokens whose K/V was in the prefix cache."""
    queried = metrics.get("outrider_prefix_cache_queries_total", 0.0)
    return percent(metrics.get("outrider_prefix_cache_hits_total", 0.0) / queried) if queried else None


def _speculation(status: Mapping[str, Any], before: Mapping[str, Any] | None) -> Table:
    target, metrics = status["target"], status["metrics"]
    speedup = metrics.get("outrider_estimated_speedup")
    draft = target["draft"] if target else {}
    tree = None
    if draft.get("algorithm") and draft.get("num_steps"):
        tree = f"depth {draft['num_steps']}, topk {draft['topk']}, {draft['num_draft_tokens']} nodes"
    accepted, drafted, rounds = (
        f"{metrics.get(f'outrider_spec_decode_num_{name}_total', 0.0):,.0f}"
        for name in ("accepted_tokens", "draft_tokens", "drafts")
    )
    return _pairs(
        ("mode of requests that name none", status["gateway"].get("speculation_mode")),
        ("algorithm", (draft.get("algorithm") or "none") if target else None),
        ("tree in mode “on”", tree),
        ("accept length", f"{target['accept_length']:.2f}" if target and target["accept_length"] else None),
        ("speed-up of recent drafted rounds", f"{speedup:.2f} ×" if speedup else None),
        ("accepted draft tokens", f"{accepted} of {drafted}"),
        ("drafted rounds", rounds),
        ("draft time per round", _mean_time("draft_seconds", metrics, before)),
        ("verify time per pass", _mean_time("verify_seconds", metrics, before)),
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
        ("draft features", ", ".join(used.get("draft_features", ())).replace("_", " ") or None),
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
    rows: list[tuple[str, str]] = []
    drafts = metrics.get("outrider_spec_decode_num_drafts_total", 0.0)
    while drafts and (accepted := metrics.get(f'outrider_accepted_tokens_total{{depth="{len(rows) + 1}"}}')):
        drafted = metrics.get(f'outrider_drafted_rounds_total{{depth="{len(rows) + 1}"}}', drafts)
        rows.append((f"depth {len(rows) + 1}", percent(accepted / drafted, 1)))
    return _pairs(*rows) if rows else _pairs(("drafted rounds", None))


def _decision(status: Mapping[str, Any]) -> Table | None:
    """Return the controller's last decision and the rounds without a draft, in words."""
    auto = (status["target"] or {}).get("auto")
    missing = [
        f"{why_no_draft(name[len(NO_DRAFT) : -len(LABEL_END)])} ({count:,.0f})"
        for name, count in status["metrics"].items()
        if name.startswith(NO_DRAFT) and count
    ]
    rows: list[tuple[str, object]] = []
    if auto:
        speed, round_ms = auto.get("estimated_speedup"), auto.get("round_ms")
        rows += [
            ("last choice", chosen(auto)),
            ("reason", why_decided(auto)),
            ("estimated speed of this choice", f"{speed:.2f} × plain decoding" if speed else None),
            ("estimated time of a round", f"{round_ms:.1f} ms" if round_ms else None),
        ]
    if missing:
        rows.append(("rounds that got no draft", "; ".join(missing)))
    return _pairs(*rows) if rows else None


def _mean_time(name: str, metrics: Mapping[str, float], before: Mapping[str, Any] | None) -> str | None:
    """Return the mean since `before`. If nothing has happened since then, return the mean since the start."""
    recent = mean_ms(name, metrics, before["metrics"]) if before else None
    mean = mean_ms(name, metrics, {}) if recent is None else recent
    return None if mean is None else f"{mean:.1f} ms"


def _count(metrics: Mapping[str, float], name: str) -> str | None:
    value = metrics.get(f"outrider_{name}")
    return None if value is None else f"{value:,.0f}"


def _errors(errors: list[dict[str, Any]]) -> Table:
    table = Table(box=None, expand=True, header_style="dim", padding=(0, 1, 0, 0))
    for title in ("time", "status", "count"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason, message, route and request id", ratio=1)
    for one in errors:
        clock = time.strftime("%H:%M:%S", time.localtime(one["at"]))
        source = f"{one['route']}  {one.get('request_id', '')}".rstrip()
        what = Text.assemble((one["reason"], "bold"), f"  {one['message']}\n", (source, "dim"))
        table.add_row(clock, str(one["status"]), str(one["count"]), what)
    return table
