"""Fits drafted trees to forms: removes forbidden nodes, and adds forced text and short lists of tokens."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import words_of
from outrider.shared.spec.trees import HostTree

MOST_CHOICES = 16
"""Up to this number of allowed tokens, all of them are added below a node."""
NOT_DRAFTED = -1
LEAST_SHARE = 1e-3
"""Least share of the probability below a node that allowed tokens are assumed to have together."""


def fitted(form: OutputForm, tree: HostTree, rows: int, depth: int) -> HostTree:
    """Return a drafted tree without the nodes that an output's form forbids, and with likely nodes added.

    Nodes that the form forbids are removed. Nodes whose tokens end the output are removed, too, because
    nothing can follow them. Two kinds of nodes are added:

    - text that the form forces;
    - tokens that the form allows in place of a forbidden node, if these are at most `MOST_CHOICES` tokens.

    If the rows do not suffice, the most probable nodes are chosen. Forced text is as probable as the node
    that it follows. It therefore replaces drafted nodes that are less probable.

    Args:
        form: The form, i.e. the constraint on the tokens of the output. It has followed the root.
        tree: The drafted tree.
        rows: Largest number of nodes.
        depth: Largest depth of a node.
    """
    return _Fit(form, tree, rows, depth).run()


@dataclass(slots=True)
class _Allowed:
    """What the form allows below a drafted node.

    Attributes:
        children: The allowed children and their costs relative to the node. A cost is a negative logprob.
        forced: The tokens that the form forces after the node.
        forbids: True if the form forbids a child.
    """

    children: list[tuple[int, float]] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)
    forbids: bool = False


class _Fit:
    """The work on one tree."""

    def __init__(self, form: OutputForm, tree: HostTree, rows: int, depth: int) -> None:
        self._form, self._tree = form, tree
        self._rows, self._depth = rows, depth
        self._children = children_of(tree)
        self._allowed = [_Allowed() for _ in tree.tokens]
        self.kept = HostTree.of_root(tree.tokens[0])
        # Nodes that may be added: cost, order, parent, token, drafted node or `NOT_DRAFTED`, and the tokens
        # that the form forces after the node.
        self._candidates: list[tuple[float, int, int, int, int, list[int]]] = []
        self._order = 0

    def run(self) -> HostTree:
        """Return the fitted tree."""
        self._follow(0)
        self._grow(0, 0.0, 0, [])
        while self._candidates and len(self.kept.tokens) < self._rows:
            cost, _, parent, token, drafted, forced = heapq.heappop(self._candidates)
            logprob = -cost if drafted == NOT_DRAFTED else self._tree.logprobs[drafted]
            self._grow(self.kept.add(token, parent, logprob), cost, drafted, forced)
        return self.kept

    def _follow(self, node: int) -> None:
        """Find out what the form allows below a drafted node, which it has followed."""
        form, tree, found = self._form, self._tree, self._allowed[node]
        found.forced = self._forced()
        lost = 0.0
        for child in self._children[node]:
            cost = max(0.0, tree.logprobs[node] - tree.logprobs[child])
            if tree.tokens[child] not in form.ends and form.accept(tree.tokens[child]):
                found.children.append((child, cost))
                self._follow(child)
                form.rollback()
            else:
                found.forbids = True
                lost += math.exp(-cost)
        # The target cannot choose the forbidden tokens. The allowed ones are more probable in proportion.
        gain = -math.log(max(1.0 - lost, LEAST_SHARE))
        found.children = [(child, max(0.0, cost - gain)) for child, cost in found.children]

    def _grow(self, place: int, cost: float, drafted: int, forced: list[int]) -> None:
        """Note the nodes that may be added below a node of the fitted tree.

        Args:
            place: The node.
            cost: Its cost.
            drafted: The drafted node, or `NOT_DRAFTED`.
            forced: Tokens that the form forces after the node, if they are known already.
        """
        if self.kept.depths[place] >= self._depth:
            return
        known = _Allowed(forbids=True) if drafted == NOT_DRAFTED else self._allowed[drafted]
        forced = forced or known.forced
        few: list[int] = []
        if not forced and known.forbids:
            forced, few = self._tokens_at(place)
        children = known.children
        if forced:
            certain = [child for child, _ in children if self._tree.tokens[child] == forced[0]]
            self._note(cost, place, forced[0], certain[0] if certain else NOT_DRAFTED, forced[1:])
            children = [(child, more) for child, more in children if child not in certain[:1]]
        for child, more in children:
            self._note(cost + more, place, self._tree.tokens[child], child, [])
        drafted_tokens = {self._tree.tokens[child] for child, _ in children}
        for token in few:
            if token not in drafted_tokens:
                self._note(cost + math.log(len(few)), place, token, NOT_DRAFTED, [])

    def _note(self, cost: float, place: int, token: int, drafted: int, forced: list[int]) -> None:
        self._order += 1
        heapq.heappush(self._candidates, (cost, self._order, place, token, drafted, forced))

    def _tokens_at(self, place: int) -> tuple[list[int], list[int]]:
        """Return the tokens that are forced at a place, or the tokens of which one must follow."""
        form, ends = self._form, self._form.ends
        path, accepted, node = [], 0, place
        while node:
            path.append(self.kept.tokens[node])
            node = self.kept.parents[node]
        while path and form.accept(path[-1]):
            path.pop()
            accepted += 1
        forced, few = [], []
        if not path:  # otherwise, `OutputForm.forced` has returned text that the form does not allow
            forced = self._forced()
            few = [] if forced else [token for token in _few(form) if token not in ends]
        for _ in range(accepted):
            form.rollback()
        return forced, few

    def _forced(self) -> list[int]:
        return [token for token in self._form.forced() if token not in self._form.ends]


def children_of(tree: HostTree) -> list[list[int]]:
    """Return the children of each node."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def _few(form: OutputForm) -> list[int]:
    """Return the allowed tokens if there are at most `MOST_CHOICES`, otherwise none."""
    mask = np.zeros(words_of(form.vocab_size), dtype=np.int32)
    form.fill(mask)
    words = np.flatnonzero(mask)
    if len(words) > MOST_CHOICES:
        return []
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    found = [int(words[row]) * 32 + int(bit) for row, bit in np.argwhere(bits)]
    return found if len(found) <= MOST_CHOICES else []
