"""Writes or checks the Grafana dashboard: ``python scripts/dashboard.py write|check``.

Grafana's JSON repeats the same forty lines for every panel. This file therefore lists the panels and
generates the JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "deploy" / "grafana" / "dashboards" / "outrider.json"
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "prometheus"}
ONE = 'instance=~"$instance"'
"""Restricts a query to the chosen gateways."""
OF_MODEL = 'model=~"$model"'
WITHOUT_MODEL = frozenset(["gateway_requests_waiting", "gateway_target_ready", "http_requests"])
"""Metrics of a whole gateway, which have no label `model`."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard.

    Attributes:
        title: Heading of the panel.
        queries: Pairs of a legend and a PromQL query.
        help: Description, which Grafana shows at the panel's info icon.
        unit: Grafana's name of the unit.
        width: Width of the panel. The dashboard is 24 columns wide.
        kind: Grafana's panel type.
        stacked: Whether to stack the series.
        most: Upper end of the axis. With None, Grafana chooses the end.
    """

    title: str
    queries: Sequence[tuple[str, str]]
    help: str = ""
    unit: str = "short"
    width: int = 8
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None


def chosen(name: str) -> str:
    """Return the matchers of a metric ``outrider_<name>`` for the chosen gateways and models."""
    return ONE if name in WITHOUT_MODEL else f"{ONE}, {OF_MODEL}"


def rate(name: str, by: str = "", where: str = "") -> str:
    """Return the summed rate of a counter ``outrider_<name>_total``."""
    matchers = f"{chosen(name)}, {where}" if where else chosen(name)
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(outrider_{name}_total{{{matchers}}}[$__rate_interval]))"


def quantile(share: float, name: str) -> str:
    """Return a quantile of a histogram ``outrider_<name>``."""
    buckets = f"rate(outrider_{name}_bucket{{{chosen(name)}}}[$__rate_interval])"
    return f"histogram_quantile({share:g}, sum by (le) ({buckets}))"


def mean(name: str) -> str:
    """Return the mean of a histogram ``outrider_<name>``."""
    total, count = (
        f"sum (rate(outrider_{name}_{part}{{{chosen(name)}}}[$__rate_interval]))" for part in ("sum", "count")
    )
    return f"{total} / {count}"


def gauge(name: str, by: str = "", how: str = "sum") -> str:
    """Return an aggregated gauge ``outrider_<name>``."""
    grouped = f" by ({by})" if by else ""
    return f"{how}{grouped} (outrider_{name}{{{chosen(name)}}})"


def percentiles(name: str) -> list[tuple[str, str]]:
    """Return queries of the 50th, 95th and 99th percentile."""
    return [(f"p{round(share * 100)}", quantile(share, name)) for share in (0.5, 0.95, 0.99)]


DRAFTS = rate("spec_decode_num_drafts")
ROWS: Sequence[tuple[str, Sequence[Panel]]] = (
    (
        "Load",
        (
            Panel("Target ready", [("", gauge("gateway_target_ready", how="min"))], width=3, kind="stat"),
            Panel("Output", [("", rate("generation_tokens"))], unit="tokens/s", width=3, kind="stat"),
            Panel(
                "Accept length",
                [("", f"1 + {rate('spec_decode_num_accepted_tokens')} / {DRAFTS}")],
                width=3,
                kind="stat",
            ),
            Panel(
                "KV cache in use",
                [("", gauge("kv_cache_usage_perc", how="max"))],
                unit="percentunit",
                width=3,
                kind="stat",
            ),
            Panel(
                "Tokens per second",
                [("output", rate("generation_tokens")), ("prompts", rate("prompt_tokens"))],
                unit="tokens/s",
                width=12,
            ),
            Panel(
                "Requests",
                [
                    ("running", gauge("num_requests_running")),
                    ("waiting", gauge("num_requests_waiting")),
                    ("waiting at the gateway", gauge("gateway_requests_waiting")),
                ],
            ),
            Panel(
                "Finished and failed",
                [
                    ("{{finished_reason}}", rate("request_success", "finished_reason")),
                    ("failed: {{reason}}", rate("request_failures", "reason")),
                ],
                unit="reqps",
            ),
            Panel(
                "HTTP status", [("{{status}}", rate("http_requests", "status"))], unit="reqps", stacked=True
            ),
        ),
    ),
    (
        "Latency",
        (
            Panel("Time to first token", percentiles("time_to_first_token_seconds"), unit="s"),
            Panel("Time between tokens", percentiles("inter_token_latency_seconds"), unit="s"),
            Panel("Whole request", percentiles("e2e_request_latency_seconds"), unit="s"),
            Panel("Time in the queue", percentiles("request_queue_time_seconds"), unit="s"),
        ),
    ),
    (
        "Speculation",
        (
            Panel(
                "Accept length over time",
                [("accept length", f"1 + {rate('spec_decode_num_accepted_tokens')} / {DRAFTS}")],
                help="Tokens per drafting round and sequence, with the token of the target.",
            ),
            Panel(
                "Accepted by position",
                [
                    (
                        "position {{position}}",
                        f"{rate('spec_decode_num_accepted_tokens_per_pos', 'position')} / scalar({DRAFTS})",
                    )
                ],
                help="Share of drafting rounds whose draft was accepted at least to this position.",
                unit="percentunit",
                most=1,
            ),
            Panel(
                "Drafted and accepted",
                [
                    ("drafted", rate("spec_decode_num_draft_tokens")),
                    ("accepted", rate("spec_decode_num_accepted_tokens")),
                ],
                unit="tokens/s",
            ),
            Panel(
                "Speed with drafts ÷ without",
                [
                    ("of the drafting rounds", gauge("estimated_speedup", how="avg")),
                    ("auto's best choice", gauge("auto_estimated_speedup", how="avg")),
                ],
                help="Estimates by the target. Below 1, mode auto decodes plainly.",
            ),
            Panel("Shapes that auto chose", [("{{shape}}", gauge("auto_rows", "shape"))], stacked=True),
            Panel(
                "Why auto decided so",
                [("{{reason}}", gauge("auto_decision", "reason", how="max"))],
                most=1,
            ),
            Panel(
                "Mean time of a round",
                [
                    ("drafting", mean("draft_seconds")),
                    ("verifying", mean("verify_seconds")),
                    ("whole round on the device", mean("device_round_seconds")),
                    ("request for trees to arrival", mean("draft_rpc_seconds")),
                ],
                unit="s",
            ),
            Panel(
                "State of speculation",
                [("{{reason}}", gauge("speculation_state", "reason", how="max"))],
                most=1,
            ),
            Panel(
                "Rounds without a requested draft",
                [
                    ("{{reason}}", rate("draft_fallback", "reason")),
                    ("reopened on the draft", rate("draft_resync")),
                ],
                unit="ops",
            ),
        ),
    ),
    (
        "Draft with its own process",
        (
            Panel("Trees per second", [("trees", rate("draft_trees"))], unit="ops", width=6),
            Panel(
                "Mean time of a step",
                [
                    ("growing trees", mean("draft_propose_seconds")),
                    ("extending", mean("draft_extend_seconds")),
                ],
                unit="s",
                width=6,
            ),
            Panel(
                "Sequences and pages",
                [
                    ("sequences", gauge("draft_sessions")),
                    ("pages {{state}}", gauge("draft_kv_pages", "state")),
                ],
                width=6,
            ),
            Panel(
                "Lost and dropped",
                [
                    ("lost: {{reason}}", rate("draft_lost_sequences", "reason")),
                    ("dropped: {{reason}}", rate("draft_messages_dropped", "reason")),
                    ("evicted", rate("draft_sessions_evicted")),
                    ("expired", rate("draft_sessions_expired")),
                    ("failed steps", rate("draft_step_failures")),
                ],
                unit="ops",
                width=6,
            ),
        ),
    ),
    (
        "Targets",
        (
            Panel(
                "Ready targets",
                [("{{target}}", gauge("gateway_ready_targets", "target"))],
                help="1 for each target that is connected and serving.",
                most=1,
            ),
            Panel(
                "Tokens on each target",
                [("{{target}}", gauge("gateway_target_load_tokens", "target"))],
                help="Prompt tokens and expected new tokens of the gateway's sequences.",
                stacked=True,
            ),
            Panel(
                "Sequences that moved to another target",
                [("{{reason}}", rate("gateway_moved_sequences", "reason"))],
                unit="ops",
            ),
        ),
    ),
    (
        "Memory",
        (
            Panel(
                "KV cache",
                [("in use", gauge("kv_cache_usage_perc", how="max"))],
                unit="percentunit",
                most=1,
            ),
            Panel("KV slots", [("{{kind}}", gauge("kv_cache_tokens", "kind"))]),
            Panel(
                "Preemptions",
                [("preemptions", rate("num_preemptions"))],
                help="Sequences that lost their pages because none was free.",
                unit="ops",
                width=4,
            ),
            Panel("CUDA graphs to record", [("left", gauge("graphs_left"))], width=4),
            Panel(
                "Prompt tokens found in the prefix cache",
                [("share", f"{rate('prefix_cache_hits')} / {rate('prefix_cache_queries')}")],
                help="Share of the prompt tokens of admitted requests.",
                unit="percentunit",
                width=12,
                most=1,
            ),
            Panel(
                "Prefix cache",
                [
                    ("slots of stored prefixes", gauge("prefix_cache_tokens")),
                    ("evicted slots per second", rate("prefix_cache_evicted_tokens")),
                ],
                width=12,
            ),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON object."""
    return {
        "uid": "outrider",
        "title": "Outrider",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                _variable("instance", "gateway_target_ready"),
                # `.*` also matches series without the label.
                _variable("model", "gateway_ready_targets") | {"allValue": ".*"},
            ]
        },
        "panels": [{**panel, "id": number} for number, panel in enumerate(_panels(), start=1)],
    }


def _variable(label: str, metric: str) -> dict[str, Any]:
    """Return a variable whose values are those of a label of the metric ``outrider_<metric>``."""
    return {
        "name": label,
        "type": "query",
        "datasource": SOURCE,
        "query": f"label_values(outrider_{metric}, {label})",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panels() -> Iterator[dict[str, Any]]:
    y = 0
    for heading, panels in ROWS:
        yield {"type": "row", "title": heading, "collapsed": False, "gridPos": _place(0, y, COLUMNS, 1)}
        y, x = y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + 8
            yield _panel(panel, x, y)
            x += panel.width
        y += 8


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "gridPos": _place(x, y, panel.width, 8),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries)
        ],
    }


def rendered() -> str:
    """Return the text of the dashboard's file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the dashboard's file. With ``check``, only return 1 if the file is not up to date."""
    if sys.argv[1:] == ["write"]:
        FILE.write_text(rendered(), encoding="utf-8")
        return 0
    if sys.argv[1:] != ["check"]:
        print(__doc__, file=sys.stderr)
        return 2
    current = FILE.exists() and FILE.read_text(encoding="utf-8") == rendered()
    if not current:
        print(f"{FILE} is not current. Run: python scripts/dashboard.py write", file=sys.stderr)
    return 0 if current else 1


if __name__ == "__main__":
    sys.exit(main())
