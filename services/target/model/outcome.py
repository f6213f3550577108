"""What verification accepted for one sequence in one round."""

from __future__ import annotations

from dataclasses import dataclass

FAILED_TOKEN = -1
"""Stands for the token of a row whose logits are not finite numbers."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row of a verified batch, before stop tokens and the length limit cut it.

    Attributes:
        num_nodes: Nodes of the row's tree, the root included.
        accepted: Indices of the accepted nodes in path order, the root excluded.
        emitted: Tokens of the accepted nodes, then the bonus token; `FAILED_TOKEN` in place of a bonus token whose logits are not
            finite numbers.
    """

    num_nodes: int
    accepted: list[int]
    emitted: list[int]
