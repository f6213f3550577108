"""The verification result of one sequence in one round: accepted nodes and emitted tokens."""

from __future__ import annotations

from dataclasses import dataclass

FAILED_TOKEN = -1
"""Value that is emitted in place of a token whose logits are not finite numbers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of verifying one sequence, before its tokens are cut at stop tokens and the length limit.

    Attributes:
        num_nodes: Number of nodes of the sequence's tree, including the root.
        accepted: Indices of the accepted nodes in path order, without the root.
        emitted: Tokens of the accepted nodes, then the bonus token. `FAILED_TOKEN` replaces the bonus token
            if its logits are not finite numbers.
    """

    num_nodes: int
    accepted: list[int]
    emitted: list[int]
