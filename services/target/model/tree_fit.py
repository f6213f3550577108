"""Fits drafted trees to forms: removes forbidden nodes, and fills the rows that become free."""

from __future__ import annotations

import heapq
import math

import numpy as np

from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.matcher import Mask
from outrider.shared.spec.trees import HostTree

MOST_CHOICES = 16
"""Up to this number of allowed tokens, all of them are added below a node."""
MOST_SEARCHED = 2
"""Number of masks that may be computed for one tree, because the device is idle meanwhile.

One mask can take more than a millisecond."""


def fitted(
    form: OutputForm, tree: HostTree, rows: int, depth: int, known: dict[int, Mask] | None = None
) -> HostTree:
    """Return a drafted tree without the nodes that an output's form forbids, and with likely nodes added.

    Nodes that the form forbids are removed. Nodes whose tokens end the output are removed, too, because
    nothing can follow them. The rows that become free are filled with two kinds of nodes:

    - text that the form forces;
    - tokens that the form allows in place of a forbidden node, if these are at most `MOST_CHOICES` tokens.

    The most probable places in the tree are filled first.

    Args:
        form: The form, i.e. the constraint on the tokens of the output. It has followed the root.
        tree: The drafted tree.
        rows: Largest number of nodes.
        depth: Largest depth of a node.
        known: Masks of the tokens that the form allows after nodes of the returned tree. The caller may give
            the mask of the root, node 0. The function adds the masks that it computes.
    """
    fit = _Fit(form, tree, rows, depth, {} if known is None else known)
    fit.keep(0, 0)
    fit.fill()
    return fit.kept


class _Fit:
    """The work on one tree."""

    def __init__(
        self, form: OutputForm, tree: HostTree, rows: int, depth: int, known: dict[int, Mask]
    ) -> None:
        self._form, self._tree = form, tree
        self._rows, self._depth = rows, depth
        self._known, self._searches_left = known, MOST_SEARCHED
        self._children = children_of(tree)
        self.kept = HostTree.of_root(tree.tokens[0])
        # Places where tokens may be added: negative logprob, node, and whether to add short lists.
        self._places: list[tuple[float, int, bool]] = []

    def keep(self, node: int, place: int) -> None:
        """Copy the allowed nodes below a node of the tree to a place in the fitted tree."""
        forbids = False
        for child in self._children[node]:
            token = self._tree.tokens[child]
            if token not in self._form.ends and self._form.accept(token):
                self.keep(child, self.kept.add(token, place, self._tree.logprobs[child]))
                self._form.rollback()
            else:
                forbids = True
        heapq.heappush(self._places, (-self.kept.logprobs[place], place, forbids))

    def fill(self) -> None:
        """Add tokens as far as there is room, at the most likely places first."""
        while self._places and len(self.kept.tokens) < self._rows:
            cost, place, choices = heapq.heappop(self._places)
            if self.kept.depths[place] >= self._depth:
                continue
            path, choice = self._tokens_at(place, choices)
            for token in path:
                if (node := self._node(token, place, cost)) is None:
                    break
                place = node
            else:
                if path:
                    heapq.heappush(self._places, (cost, place, True))
            cost += math.log(max(len(choice), 1))
            for token in choice:
                if (node := self._node(token, place, cost)) is not None:
                    heapq.heappush(self._places, (cost, node, True))

    def _tokens_at(self, place: int, choices: bool) -> tuple[list[int], list[int]]:
        """Return the path of tokens that is forced at a place, or the tokens of which one must follow."""
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
            forced = [token for token in form.forced() if token not in ends]
            if choices and not forced:
                few = [token for token in self._few(place) if token not in ends]
        for _ in range(accepted):
            form.rollback()
        return forced, few

    def _few(self, place: int) -> list[int]:
        """Return the tokens allowed after a node if there are at most `MOST_CHOICES`, otherwise none.

        The form has followed the path to the node. Where any text may follow, and after `MOST_SEARCHED`
        masks, return none.
        """
        if place not in self._known:
            if not self._searches_left or self._form.takes_text():
                return []
            self._searches_left -= 1
            self._known[place] = self._form.next_mask()
        mask = self._known[place]
        words = np.flatnonzero(mask)
        if len(words) > MOST_CHOICES:
            return []
        bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little").reshape(-1, 32)
        found = [int(words[row]) * 32 + int(bit) for row, bit in np.argwhere(bits)]
        return found if len(found) <= MOST_CHOICES else []

    def _node(self, token: int, place: int, cost: float) -> int | None:
        """Return the node of a token below a place, which is added if necessary. None if there is no room."""
        kept = self.kept
        for node in range(place + 1, len(kept.tokens)):
            if kept.parents[node] == place and kept.tokens[node] == token:
                return node
        if len(kept.tokens) >= self._rows or kept.depths[place] >= self._depth:
            return None
        return kept.add(token, place, -cost)


def children_of(tree: HostTree) -> list[list[int]]:
    """Return the children of each node."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents):
        if parent >= 0:
            children[parent].append(node)
    return children
