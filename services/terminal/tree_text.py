"""Shows the draft tree of a traced round as text."""

from __future__ import annotations

import math
from typing import Any

from rich.text import Text
from rich.tree import Tree

from outrider.services.terminal.origins import BONUS_STYLE, style_of

AFTER_THE_END = "after the end of the answer"


def round_tree(trace: dict[str, Any]) -> Tree:
    """Return the tree of one round: the text, the draft's probability and the fate of each node.

    The answer can end inside the tree, at a stop token or at the length limit. The nodes below the last token
    of the answer are then marked, because they are not part of it.
    """
    nodes, emitted, accepted = trace["nodes"], trace["emitted_text"], trace["accepted"]
    root = Tree(Text(_shown(nodes[0])))
    branches = [root]
    late = _nodes_after_the_end(trace)
    for index, node in enumerate(nodes[1:], 1):
        probability = math.exp(node["logprob"]) if node["logprob"] is not None else 0.0
        style, fate = "dim", "rejected"
        if index in late:
            fate = AFTER_THE_END
        elif index in accepted:
            position = accepted.index(index)
            style = f"bold {style_of(trace, position)}"
            fate = "accepted, ends the answer" if _is_last(trace, position) else "accepted"
        text = Text.assemble((_shown(node), style), (f"  {100 * probability:.1f} %  {fate}", "dim"))
        branches.append(branches[node["parent"]].add(text))
    if len(emitted) > len(accepted):
        last = branches[accepted[-1]] if accepted else root
        what = "chosen by the target" if len(nodes) > 1 else "decoded without a draft"
        text = emitted[len(accepted)]
        shown = repr(text) if text else f"token {trace['emitted'][-1]}"
        last.add(Text.assemble((shown, f"bold {BONUS_STYLE}"), (f"  {what}", "dim")))
    return root


def _nodes_after_the_end(trace: dict[str, Any]) -> set[int]:
    """Return the nodes below the last token of the answer, or an empty set if the answer goes on.

    A round that does not end the answer emits one token more than it accepts.
    """
    num_emitted, accepted = len(trace["emitted_text"]), trace["accepted"]
    if len(trace["nodes"]) < 2 or num_emitted > len(accepted):
        return set()
    last = accepted[num_emitted - 1] if num_emitted else 0
    late: set[int] = set()
    # Each node comes after its parent.
    for index, node in enumerate(trace["nodes"][1:], 1):
        if node["parent"] == last or node["parent"] in late:
            late.add(index)
    return late


def _is_last(trace: dict[str, Any], position: int) -> bool:
    """Return True if the answer ended at the accepted node at this position."""
    num_emitted = len(trace["emitted_text"])
    return position == num_emitted - 1 and num_emitted <= len(trace["accepted"])


def _shown(node: dict[str, Any]) -> str:
    return repr(node["text"]) if node["text"] is not None else f"token {node['token']}"
