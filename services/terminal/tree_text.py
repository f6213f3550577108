"""Shows the draft tree of a traced round as text."""

from __future__ import annotations

import math
from typing import Any

from rich.text import Text
from rich.tree import Tree

from outrider.services.terminal.origins import BONUS_STYLE, style_of


def round_tree(trace: dict[str, Any]) -> Tree:
    """Return the tree of one round: accepted nodes in bold, and the draft's probability of each node."""
    accepted = {node: position for position, node in enumerate(trace["accepted"])}
    nodes = trace["nodes"]
    root = Tree(Text(_shown(nodes[0])))
    branches = [root]
    for index, node in enumerate(nodes[1:], 1):
        probability = math.exp(node["logprob"]) if node["logprob"] is not None else 0.0
        style = f"bold {style_of(trace, accepted[index])}" if index in accepted else "dim"
        text = Text.assemble((_shown(node), style), (f"  {100 * probability:.1f} %", "dim"))
        branches.append(branches[node["parent"]].add(text))
    emitted, count = trace["emitted_text"], len(accepted)
    if len(emitted) > count:
        last = branches[trace["accepted"][-1]] if accepted else root
        what = "chosen by the target" if len(nodes) > 1 else "decoded without a draft"
        last.add(Text.assemble((repr(emitted[count]), f"bold {BONUS_STYLE}"), (f"  {what}", "dim")))
    return root


def _shown(node: dict[str, Any]) -> str:
    return repr(node["text"]) if node["text"] is not None else f"token {node['token']}"
