"""Finds earlier occurrences of a sequence's last tokens, and builds a trie of their continuations.

This module runs numpy on the host. Each round builds a new trie from at most `MAX_MATCHES` occurrences.
Searching 32k tokens of history for occurrences takes about 15 µs. A permanent trie of all n-grams would need
a few kilobytes of Python objects per token, and would be slower to maintain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.shared.spec.tree import DraftShape
from outrider.shared.spec.trees import HostTree

TokenArray = NDArray[np.int32]

MAX_MATCHES = 48
"""Maximum number of occurrences in a trie. The longest matches are kept; among equally long matches, the
latest are kept."""
MATCH_GROWTH = 2.0
"""Factor by which a continuation's weight grows with each further token of matching context."""
OLDEST_WEIGHT = 0.5
"""Weight of a continuation at the beginning of the text, relative to a continuation at the end of the
text."""
SEPARATOR = -1
"""Marks the end of a document. No token id has this value."""


class TokenHistory:
    """The tokens of one sequence so far, in a growing buffer."""

    __slots__ = ("_buffer", "length")

    def __init__(self) -> None:
        self._buffer: TokenArray = np.empty(64, dtype=np.int32)
        self.length = 0

    @property
    def tokens(self) -> TokenArray:
        """All tokens, as a view of the buffer."""
        return self._buffer[: self.length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        stop = self.length + len(tokens)
        if stop > len(self._buffer):
            grown = np.empty(2 * stop, dtype=np.int32)
            grown[: self.length] = self.tokens
            self._buffer = grown
        self._buffer[self.length : stop] = tokens
        self.length = stop


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the current sequence's last tokens (its suffix).

    Attributes:
        text: The text, as token ids, that contains the occurrence.
        end: Index of the occurrence's last token in the text.
        length: Number of tokens that the occurrence shares with the current suffix.
        weight: Weight of the tokens that follow the occurrence (its continuation).
        repeats: True if `text` is the current sequence itself. A continuation that reaches the end of the
            text then continues with its own first tokens.
    """

    text: TokenArray
    end: int
    length: int
    weight: float
    repeats: bool = False

    def continuation(self, depth: int) -> Iterator[int]:
        """Yield up to `depth` tokens that follow the occurrence."""
        made: list[int] = []
        for index in range(self.end + 1, self.end + 1 + depth):
            if index < len(self.text):
                token = int(self.text[index])
            elif self.repeats:
                token = made[index - len(self.text)]
            else:
                return
            if token == SEPARATOR:
                return
            made.append(token)
            yield token


def find_matches(text: TokenArray, min_match: int, max_match: int) -> list[Match]:
    """Find earlier occurrences of the last tokens of `text`.

    The longest matches come first. Among matches of equal length, later occurrences come first. A match must
    have at least `min_match` tokens. At most `max_match` tokens are compared.
    """
    if len(text) < 2:
        return []
    ends = np.flatnonzero(text[:-1] == text[-1])
    return rank_matches(text, ends, text, min_match, max_match, repeats=True)


def rank_matches(
    text: TokenArray,
    ends: NDArray[np.int64],
    suffix: TokenArray,
    min_match: int,
    max_match: int,
    *,
    repeats: bool,
) -> list[Match]:
    """Measure the lengths of the matches that end at given tokens, and return the best `MAX_MATCHES` matches.

    Args:
        text: The text, as token ids, that contains the occurrences.
        ends: Ascending indices of the tokens in `text` that equal the last token of `suffix`.
        suffix: The current sequence, whose last tokens are compared.
        min_match: Matches shorter than this number of tokens are dropped.
        max_match: A longer match counts as a match of this length.
        repeats: True if `text` is the current sequence itself; see `Match`.
    """
    lengths = np.ones(len(ends), dtype=np.int64)
    alive = np.arange(len(ends))
    for shared in range(1, min(max_match, len(suffix))):
        alive = alive[ends[alive] >= shared]
        alive = alive[text[ends[alive] - shared] == suffix[-1 - shared]]
        if not len(alive):
            break
        lengths[alive] += 1
    best = np.lexsort((-ends, -lengths))[:MAX_MATCHES]
    last = max(1, len(text) - 1)
    matches = []
    for index in best:
        end, length = int(ends[index]), int(lengths[index])
        if length < min_match:
            break
        recency = OLDEST_WEIGHT + (1 - OLDEST_WEIGHT) * end / last
        matches.append(Match(text, end, length, MATCH_GROWTH ** (length - 1) * recency, repeats))
    return matches


@dataclass(slots=True)
class _Node:
    weight: float = 0.0
    children: dict[int, _Node] = field(default_factory=dict)


class ContinuationTrie:
    """A trie of the tokens that followed earlier occurrences of the current sequence's last tokens.

    Continuations with a common prefix share nodes. The weight of a node is the sum of the weights of the
    matches whose continuations pass through it.
    """

    def __init__(self, matches: Sequence[Match], depth: int) -> None:
        self._root = _Node()
        for match in matches:
            node = self._root
            node.weight += match.weight
            for token in match.continuation(depth):
                node = node.children.setdefault(token, _Node())
                node.weight += match.weight

    def tree(self, root_token: int, shape: DraftShape) -> HostTree:
        """Return the heaviest nodes of the trie as a draft tree of this shape.

        In each level, at most `topk` nodes have children, and each of these nodes has at most `topk`
        children. The log-probability of a node is the logarithm of (node's weight / parent's weight). A child
        never outweighs its parent, so the selected nodes always form a tree.
        """
        levels: list[list[_Candidate]] = []
        beam = [_Candidate(self._root, root_token, None)]
        for _ in range(shape.depth):
            # Expand the heaviest nodes of each level in turn. Keep all children as candidates.
            beam = [child for candidate in beam for child in candidate.best_children(shape.topk)]
            if not beam:
                break
            levels.append(beam)
            beam = sorted(beam, key=lambda candidate: -candidate.node.weight)[: shape.topk]
        candidates = [candidate for level in levels for candidate in level]
        order = sorted(range(len(candidates)), key=lambda index: (-candidates[index].node.weight, index))[
            : shape.max_nodes - 1
        ]
        tree = HostTree.of_root(root_token)
        for index in sorted(order):
            candidates[index].add_to(tree)
        return tree


class _Candidate:
    __slots__ = ("index", "node", "parent", "token")

    def __init__(self, node: _Node, token: int, parent: _Candidate | None) -> None:
        self.node = node
        self.token = token
        self.parent = parent
        self.index = 0

    def best_children(self, topk: int) -> list[_Candidate]:
        ranked = sorted(self.node.children.items(), key=lambda item: -item[1].weight)[:topk]
        return [_Candidate(node, token, self) for token, node in ranked]

    def add_to(self, tree: HostTree) -> None:
        assert self.parent is not None, "the root is in the tree already"
        self.index = tree.add(
            self.token, self.parent.index, math.log(self.node.weight / self.parent.node.weight)
        )
