"""Draws the draft tree of a recorded round: the accepted path, the rejected branches, the emitted tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.bench.plot.canvas import Canvas, Theme
from outrider.bench.plot.charts import Heading

COLUMN, ROW = 138.0, 34.0
LEFT, TOP, FOOT = 24.0, 84.0, 78.0
BOX_WIDTH, BOX_HEIGHT = 100.0, 26.0
CHARACTER = 8.5
"""Width of a character of the emitted text."""
LONGEST = 11
"""Characters of a token that fit in its box."""


def tree_picture(theme: Theme, heading: Heading, one: Mapping[str, Any]) -> str:
    """Return an SVG picture of the draft tree of one round.

    Args:
        theme: The colours.
        heading: Title, subtitle and source.
        one: One round from the trace of a reply, with three entries: `nodes` (each with parent, depth,
            logprob and text), `accepted` (indices of the accepted nodes) and `emitted_text`.
    """
    nodes: Sequence[Mapping[str, Any]] = one["nodes"]
    accepted = {0, *one["accepted"]}
    rows = _rows(nodes, accepted)
    depth = max(int(node["depth"]) for node in nodes)
    width = LEFT * 2 + depth * COLUMN + BOX_WIDTH + 16
    height = TOP + (max(rows) + 1) * ROW + FOOT
    emitted = "".join(one["emitted_text"])
    told = f"{len(one['accepted'])} of {len(nodes) - 1} drafted tokens were accepted. It emitted: {emitted}"
    canvas = Canvas(max(width, 640), height, theme, heading.title, told)
    canvas.text(LEFT, 30, heading.title, size=17, bold=True)
    canvas.text(LEFT, 50, heading.subtitle, size=12.5, colour=theme.muted)
    places = [
        (LEFT + int(node["depth"]) * COLUMN, TOP + row * ROW) for node, row in zip(nodes, rows, strict=True)
    ]
    # Draw the accepted path last, above all other branches.
    order = sorted(range(len(nodes)), key=lambda index: index in accepted)
    for index in order:
        parent = int(nodes[index]["parent"])
        if parent >= 0:
            (x, y), (px, py) = places[index], places[parent]
            on_path = index in accepted
            canvas.curve(
                (px + BOX_WIDTH, py + BOX_HEIGHT / 2),
                (x, y + BOX_HEIGHT / 2),
                theme.series[0] if on_path else theme.grid,
                3 if on_path else 1.5,
            )
    for index in order:
        _box(canvas, places[index], nodes[index], index in accepted)
    base = height - FOOT + 30
    canvas.text(LEFT, base, "emitted", size=12, colour=theme.muted)
    x = LEFT + 66
    for number, text in enumerate(one["emitted_text"]):
        drafted = number < len(one["accepted"])
        canvas.text(
            x, base, _shown(text), size=14, mono=True, bold=True, colour=theme.series[0 if drafted else 2]
        )
        x += CHARACTER * len(text)
    canvas.text(x + 16, base, "the last token is the target's own", size=12, colour=theme.series[2])
    canvas.text(
        max(width, 640) - 12, height - 10, heading.source, size=10.5, colour=theme.muted, anchor="end"
    )
    return canvas.render()


def _box(canvas: Canvas, place: tuple[float, float], node: Mapping[str, Any], on_path: bool) -> None:
    theme = canvas.theme
    x, y = place
    fill = theme.series[0] if on_path else theme.ground
    canvas.box(
        x, y, BOX_WIDTH, BOX_HEIGHT, fill=fill, stroke=theme.series[0] if on_path else theme.muted, radius=5
    )
    text = _shown(str(node["text"]))
    if len(text) > LONGEST:
        text = text[: LONGEST - 1] + "…"
    canvas.text(x + 8, y + 17, text, size=12, mono=True, colour=theme.ground if on_path else theme.ink)
    if int(node["depth"]):
        share = math.exp(float(node["logprob"]))
        label = f"{share:.0%}" if share >= 0.005 else "<1%"
        canvas.text(x + BOX_WIDTH + 4, y + 11, label, size=9.5, colour=theme.muted)


def _rows(nodes: Sequence[Mapping[str, Any]], accepted: set[int]) -> list[int]:
    """Return the row of each node. A node's first child shares its row; the accepted path is at the top."""
    children: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(int(node["parent"]), []).append(index)
    rows = [0] * len(nodes)
    following = 0

    def place(index: int) -> None:
        nonlocal following
        rows[index] = following
        ranked = sorted(
            children.get(index, ()),
            key=lambda child: (child not in accepted, -float(nodes[child]["logprob"])),
        )
        for number, child in enumerate(ranked):
            following += number > 0
            place(child)

    place(0)
    return rows


def _shown(text: str) -> str:
    """Return a token's text with visible blanks and line breaks."""
    return text.replace("\n", "⏎").replace(" ", "·") or "∅"
