"""The pictures of the documents, and the recorded results that each one shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.bench.plot.canvas import Theme
from outrider.bench.plot.charts import Axis, Bar, Heading, Series, bar_chart, line_chart
from outrider.bench.plot.tree import tree_picture
from outrider.shared.base.errors import ConfigurationError

SESSION = "2026-11-21T2006Z"
LATENCY = tuple(f"{SESSION}/latency_{name}_h200.json" for name in ("plain", "chain3", "chain5"))
SINGLE = "latency_h200.json"
ROUND = "round_demo_cpu.json"
HELDOUT = "demo_pair_heldout.json"
MIXED = (
    "loop-2026-11-22/mixed_odd.json",
    "loop-2026-11-22/mixed_odd2.json",
    "gpu-2026-11-23/odd.json",
    "gpu-2026-11-23-second/odd.json",
    "gpu-2026-11-23-third/odd.json",
)
"""Runs of the part `odd` of `outrider bench mixed`, the oldest first."""
BATCHES = (1, 4, 16, 64)
DEEPEST = {"chain 3": 4, "chain 5": 6, "tree 5/8/32": 6}
"""Kind of round → largest accept length: the tokens of a fully accepted path, plus the bonus token."""


def round_tree_picture(results: Path, theme: Theme) -> str:
    """Return the draft tree of a recorded round."""
    recorded = _read(results, ROUND)
    one = recorded["round"]
    question = recorded["request"]["messages"][0]["content"]
    heading = Heading(
        "One round: a draft tree and what the target accepted",
        f"“{question}” The draft proposed {len(one['nodes']) - 1} tokens, with its probabilities. "
        f"{len(one['accepted'])} were accepted.",
        f"{ROUND}: embedded pair, temperature 1",
    )
    return tree_picture(theme, heading, one)


def speed_by_batch(results: Path, theme: Theme) -> str:
    """Return the speed of drafting rounds relative to plain rounds, by batch size."""
    rows = [row for name in LATENCY for row in _read(results, name)["rows"]]
    plain = {row["batch"]: row["tok_s"] for row in rows if row.get("kind") == "plain"}
    series = []
    for kind in ("chain 3", "chain 5"):
        found = sorted((row["batch"], row) for row in rows if row.get("kind") == kind)
        length = sum(row["accept_length"] for _, row in found) / len(found)
        points = [(float(batch), row["tok_s"] / plain[batch]) for batch, row in found]
        series.append(Series(f"{kind}, accept length {length:.1f}", points))
    heading = Heading(
        "Speed with drafts, by number of requests",
        "Tokens per second ÷ plain decoding. Llama-3.1-8B shape, bf16, one H200, synthetic acceptance.",
        f"bench/results/{SESSION}",
    )
    x = Axis("requests at the same time", BATCHES, logarithmic=True)
    y = Axis("times as fast as plain decoding", (0, 0.5, 1, 1.5, 2, 2.5))
    return line_chart(theme, heading, x, y, series, reference=1)


def speed_by_acceptance(results: Path, theme: Theme) -> str:
    """Return the speed at batch 1 as a function of the accept length, from measured durations of rounds."""
    rows = {row["kind"]: row for row in _read(results, SINGLE)["rows"] if row.get("batch") == 1}
    plain_ms = rows["plain"]["value"]
    series = []
    for kind, most in DEEPEST.items():
        gain = plain_ms / rows[kind]["value"]
        measured = (rows[kind]["accept_length"], rows[kind]["tok_s"] / rows["plain"]["tok_s"])
        series.append(Series(kind, [(1.0, gain), (float(most), most * gain)], [measured]))
    heading = Heading(
        "Speed with drafts, by accept length",
        "One request. Dots: measured speeds. Lines: accept length × plain round ÷ drafting round.",
        f"bench/results/{SINGLE}: Llama-3.1-8B shape, bf16, one H200",
    )
    x = Axis("accept length (tokens per round)", (1, 2, 3, 4, 5, 6))
    y = Axis("times as fast as plain decoding", (0, 1, 2, 3, 4, 5))
    return line_chart(theme, heading, x, y, series, reference=1)


def mixed_load(results: Path, theme: Theme) -> str:
    """Return how much speed equal requests keep beside one that differs. The newest run of a case counts."""
    recorded = [_read(results, name) for name in MIXED]
    newest = {row["name"]: row for one in recorded for row in one["rows"] if row["section"] == "odd"}
    bars = [Bar(name, float(row["ratio"]), row["goal"]) for name, row in sorted(newest.items())]
    batch = recorded[0]["settings"]["batch"]
    heading = Heading(
        "Speed beside one request that differs",
        f"Tokens per second of {batch} equal requests beside it, ÷ beside one more equal request.",
        "Llama-3.1-8B shape, one H200. The newest run of each case: docs/performance.md names its folder",
    )
    axis = Axis("speed left (marks: goals)", (0, 0.25, 0.5, 0.75, 1, 1.25))
    return bar_chart(theme, heading, axis, bars)


def accepted_by_position(results: Path, theme: Theme) -> str:
    """Return the share of rounds in which the draft was accepted at least to each position."""
    recorded = _read(results, HELDOUT)
    steps = recorded["num_steps"]
    series = []
    for name, label in (("T=0", "temperature 0"), ("T=1 coupled", "temperature 1")):
        found = recorded["heldout"][name]
        # A round that emitted n tokens accepted n - 1 draft tokens.
        rounds = sum(found["histogram"].values())
        points = [
            (
                float(position),
                sum(count for key, count in found["histogram"].items() if int(key) > position) / rounds,
            )
            for position in range(1, steps + 1)
        ]
        series.append(Series(f"{label}, accept length {found['accept_length']:.1f}", points))
    heading = Heading(
        "Drafted tokens that were accepted, by position",
        f"Share of rounds, with trees of depth {steps}. Embedded pair, 70 prompts outside its training data.",
        f"bench/results/{HELDOUT}",
    )
    x = Axis("position in the draft", tuple(range(1, steps + 1)))
    y = Axis("share of rounds accepted at least to here", (0, 0.2, 0.4, 0.6, 0.8, 1))
    return line_chart(theme, heading, x, y, series)


PICTURES: Mapping[str, Callable[[Path, Theme], str]] = {
    "round-tree": round_tree_picture,
    "speed-by-batch": speed_by_batch,
    "speed-by-acceptance": speed_by_acceptance,
    "mixed-load": mixed_load,
    "accepted-by-position": accepted_by_position,
}
"""Name of the file without the theme → function that makes the picture from the folder of results."""


def _read(results: Path, name: str) -> Any:
    """Read a result file.

    Raises:
        ConfigurationError: The file is missing or is not valid JSON.
    """
    try:
        return json.loads((results / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--results {results}: cannot read {name}: {error}.", field="--results"
        ) from None
