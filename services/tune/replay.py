"""Predicts the accept length of any tree shape from the recorded trees of a larger shape.

A draft proposes the same tokens for every shape, but a smaller shape keeps fewer of them. The tokens of the
answer do not depend on the shape either. A recorded round therefore shows how many tokens a smaller tree at
the same position would have accepted. This number is the length of the smaller tree's longest path from the
root whose tokens match the answer.

The end of an answer cuts its last round short. A deep shape loses more by this than a shallow one, so the
prediction counts the rounds of whole answers. From the recorded rounds, it estimates for each level how often
the draft is still right there. Rounds whose answer ends above a level do not count for that level. From these
shares follows the expected number of rounds of an answer with a given length.

The prediction is an estimate, because rounds of a smaller tree would begin at other positions than the
recorded rounds. `search` therefore measures the best shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.shared.spec.tree import DraftShape


@dataclass(frozen=True)
class RecordedTree:
    """The tree of one round, and the tokens of the answer that follow its root.

    Attributes:
        tokens: Token of each node. Node 0 is the root. Parents come before their children.
        parents: Index of each node's parent; -1 for the root.
        scores: Log-probability, under the draft, of the path from the root to each node.
        following: Tokens of the answer after the root.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    scores: Sequence[float]
    following: Sequence[int]

    @classmethod
    def of(cls, entry: Mapping[str, Any], prompt_len: int, answer: Sequence[int]) -> RecordedTree:
        """Return the recorded tree of one round of an answer.

        Args:
            entry: The round's entry in the `trace` of the reply.
            prompt_len: Number of tokens of the prompt.
            answer: All tokens of the answer.
        """
        nodes = entry["nodes"]
        scores: list[float] = []
        for node in nodes:
            scores.append(node["logprob"] + (scores[node["parent"]] if node["parent"] >= 0 else 0.0))
        return cls(
            [node["token"] for node in nodes],
            [node["parent"] for node in nodes],
            scores,
            answer[max(0, entry["base_len"] - prompt_len) :],
        )

    def accepted(self, shape: DraftShape) -> int:
        """Return the number of draft tokens that a tree of this shape accepts at this position."""
        kept = self._nodes_of(shape)
        node, accepted = 0, 0
        for token in self.following[: shape.depth]:
            match = [child for child in self._children[node] if child in kept and self.tokens[child] == token]
            if not match:
                break
            node, accepted = match[0], accepted + 1
        return accepted

    @cached_property
    def _children(self) -> list[list[int]]:
        """The children of each node, the best first."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(node)
        for found in children:
            found.sort(key=self._rank)
        return children

    def _nodes_of(self, shape: DraftShape) -> set[int]:
        """Return the nodes that a draft with this shape keeps: the best nodes of a beam search by level."""
        beam, candidates = [0], []
        for _ in range(shape.depth):
            level = [node for parent in beam for node in self._children[parent][: shape.topk]]
            candidates += level
            beam = sorted(level, key=self._rank)[: shape.topk]
        return set(sorted(candidates, key=self._rank)[: shape.max_nodes - 1])

    def _rank(self, node: int) -> tuple[float, int]:
        return -self.scores[node], node


def accept_length(trees: Sequence[RecordedTree], shape: DraftShape, lengths: Sequence[int]) -> float:
    """Return the predicted mean number of tokens per round of a tree shape, including the bonus token.

    Args:
        trees: The recorded trees of the answers, each at least as large as the shape.
        shape: The shape.
        lengths: Number of tokens of each answer. The first token of an answer belongs to no round.
    """
    tokens = sum(length - 1 for length in lengths if length > 1)
    if not shape.drafts or not trees or tokens == 0:
        return 1.0
    rounds = _expected_rounds(_survival(trees, shape), max(lengths) - 1)
    return tokens / sum(rounds[length - 1] for length in lengths if length > 1)


def _survival(trees: Sequence[RecordedTree], shape: DraftShape) -> list[float]:
    """Return, for each level including the root, the share of rounds that accept a node there.

    This is the Kaplan-Meier estimate. A round whose answer ends after n tokens says nothing about levels
    below the n-th one.
    """
    accepted = [(tree.accepted(shape), len(tree.following)) for tree in trees]
    shares = [1.0]
    for level in range(1, shape.columns):
        reached = [count for count, most in accepted if count >= level - 1 and most >= level]
        right = sum(count >= level for count in reached)
        shares.append(shares[-1] * right / len(reached) if reached else 0.0)
    return shares


def _expected_rounds(survival: Sequence[float], most: int) -> list[float]:
    """Return the expected number of rounds that yield at least n tokens, for n from 0 to `most`."""
    ends = [here - below for here, below in zip(survival, [*survival[1:], 0.0], strict=True)]
    rounds = [0.0]
    for left in range(1, most + 1):
        after = (share * rounds[max(0, left - 1 - accepted)] for accepted, share in enumerate(ends))
        rounds.append(1.0 + sum(after))
    return rounds
