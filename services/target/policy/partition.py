"""Divides the requests of a round among at most two tree shapes and plain decoding.

The objective is the largest number of expected tokens per second of the round:

    expected tokens, summed over all requests  /  seconds of the round (`StepCosts.round`)

Each node of a tree makes the round longer. The *price* of a node is the number of tokens that the round could
produce in this additional time. Each request gets the shape with the most expected tokens after the price of
its nodes is deducted. Requests with good drafts therefore get large shapes, and requests with bad drafts
decode plainly. Requests with equal expectations form one class, so that a decision does not take longer for a
larger batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from outrider.services.target.policy.cost_model import DraftPath, StepCosts
from outrider.services.target.policy.offered_shapes import MOST_ROWS
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

SMALL_STEP_ROWS = 32
"""A round may have up to this many rows (nodes of all trees) even if no round of half its size has been
measured."""
MOST_SHAPES = 2
MOST_OFFERED = 8
"""Largest number of shapes that are compared. Further bounds of requests then cannot prolong a decision."""
PRICE_STEPS = 2
"""Number of times that the price is computed from the rate of the latest partition."""


@dataclass(frozen=True, slots=True)
class EntryClass:
    """Entries with the same expectations.

    Attributes:
        tokens: Expected tokens of a round for each shape that these entries may have.
        count: Number of entries.
    """

    tokens: Mapping[DraftShape, float]
    count: int


@dataclass(frozen=True, slots=True)
class Others:
    """The requests of a round whose tree shapes `Partitions` does not choose.

    Attributes:
        shapes: Number of these requests by tree shape, including `NO_DRAFT`.
        tokens: Expected tokens of all these requests.
    """

    shapes: Mapping[DraftShape, int]
    tokens: float

    @property
    def count(self) -> int:
        """Number of requests."""
        return sum(self.shapes.values())

    @property
    def nodes(self) -> int:
        """Number of nodes, roots included."""
        return sum(shape.max_nodes * count for shape, count in self.shapes.items())


@dataclass(frozen=True, slots=True)
class Partition:
    """A rule that assigns a tree shape to each request of a round, and the expected result of this rule.

    Attributes:
        shapes: The tree shapes that requests may get instead of plain decoding.
        price: Number of tokens that each tree node must yield.
        rate: Expected tokens per second of the round.
        seconds: Expected duration of the round.
        counts: Number of requests that get each shape.
    """

    shapes: tuple[DraftShape, ...]
    price: float
    rate: float
    seconds: float
    counts: Mapping[DraftShape, int]

    def shape_for(self, tokens: Mapping[DraftShape, float]) -> DraftShape:
        """Return the shape of an entry with these expected tokens for each shape that it may have."""
        return self._best(tokens)[0]

    def gain_for(self, tokens: Mapping[DraftShape, float]) -> float:
        """Return the tokens that an entry gains from its shape after the price of its nodes is deducted."""
        return self._best(tokens)[1]

    def _best(self, tokens: Mapping[DraftShape, float]) -> tuple[DraftShape, float]:
        best, most = NO_DRAFT, 0.0
        for shape in self.shapes:
            if shape in tokens:
                gain = tokens[shape] - 1.0 - self.price * (shape.max_nodes - 1)
                if gain > most:
                    best, most = shape, gain
        return best, most


class Partitions:
    """Compares partitions, i.e. divisions of a round's requests among tree shapes and plain decoding.

    Args:
        classes: The `auto` requests, in classes with equal expectations.
        others: The other requests of the round.
        costs: The measured costs.
        path: Where the trees come from.

    Attributes:
        batch_size: Number of requests of the round.
        path: Where the trees come from.
        most_rows: Largest number of tree nodes of the round.
        offered: The tree shapes that are compared: those that are allowed for the most requests.
        plain: The partition in which all `auto` requests decode plainly.
    """

    def __init__(
        self, classes: Sequence[EntryClass], others: Others, costs: StepCosts, path: DraftPath
    ) -> None:
        self._classes = classes
        self._others = others
        self._costs = costs
        self.path = path
        self._count = sum(one.count for one in classes)
        self.batch_size = self._count + others.count
        # A round has at most twice the rows of the largest measured round, so that even a round that is
        # slower than expected stays short.
        self.most_rows = min(max(SMALL_STEP_ROWS, 2 * costs.most_rows(self.batch_size)), MOST_ROWS)
        self.plain = self.of((), 0.0)
        allowed: Counter[DraftShape] = Counter()
        for one in classes:
            for shape in one.tokens:
                allowed[shape] += one.count
        self.offered = [shape for shape, _ in allowed.most_common(MOST_OFFERED)]

    def best(self, kept: tuple[DraftShape, ...], advantage: float) -> Partition:
        """Return the best partition of the round's requests among tree shapes and plain decoding.

        Args:
            kept: The tree shapes in use.
            advantage: Other shapes replace `kept` only if they have at least this multiple of its tokens per
                second.
        """
        offered, best = self.offered, self.plain
        for shape in offered:
            best = max(best, self.priced((shape,), best.rate), key=_rate)
        if best.shapes:
            first = best.shapes[0]
            for pair in combinations(offered, MOST_SHAPES):
                if first in pair:
                    best = max(best, self.priced(pair, best.rate), key=_rate)
        if kept != best.shapes and all(shape in offered for shape in kept):
            current = self.priced(kept, best.rate) if kept else self.plain
            if set(current.shapes) == set(kept) and best.rate < advantage * current.rate:
                return current
        return best

    def priced(self, shapes: tuple[DraftShape, ...], rate: float) -> Partition:
        """Return the best partition of the requests that uses only these tree shapes and plain decoding.

        Args:
            shapes: The tree shapes that requests may get.
            rate: Tokens per second from which the first price of a node is computed.
        """
        best: Partition | None = None
        for _ in range(PRICE_STEPS):
            found = self.of(shapes, rate * self._node_s(shapes))
            if best is not None and found.rate <= best.rate:
                break
            best, rate = found, max(rate, found.rate)
        assert best is not None
        return best

    def of(self, shapes: tuple[DraftShape, ...], price: float) -> Partition:
        """Return the partition with these shapes and this price."""
        rule = Partition(shapes, price, 0.0, 0.0, {})
        counts: dict[DraftShape, int] = {}
        tokens, rows = self._others.tokens + self._count, self._others.nodes + self._count
        for gain, shape, one in sorted(self._gains(rule), key=lambda found: -found[0]):
            count = min(one.count, (self.most_rows - rows) // (shape.max_nodes - 1))
            if gain > 0 and count > 0:
                counts[shape] = counts.get(shape, 0) + count
                tokens += count * (one.tokens[shape] - 1.0)
                rows += count * (shape.max_nodes - 1)
        used = tuple(shape for shape in shapes if shape in counts)
        seconds = self._seconds(counts, rows)
        return Partition(used, price, tokens / seconds, seconds, counts)

    def _seconds(self, counts: Mapping[DraftShape, int], rows: int) -> float:
        groups = {shape: count for shape, count in self._others.shapes.items() if shape.drafts}
        for shape, count in counts.items():
            groups[shape] = groups.get(shape, 0) + count
        return self._costs.round(self.batch_size, rows, groups, self.path)

    def _gains(self, rule: Partition) -> Iterator[tuple[float, DraftShape, EntryClass]]:
        for one in self._classes:
            shape = rule.shape_for(one.tokens)
            if shape.drafts:
                yield rule.gain_for(one.tokens), shape, one

    def _node_s(self, shapes: tuple[DraftShape, ...]) -> float:
        """Return the seconds that one more node costs if all entries have the largest of the shapes."""
        low = self._others.nodes + self._count
        high = low + self._count * (max((shape.max_nodes for shape in shapes), default=1) - 1)
        high = max(low + 1, min(high, self.most_rows))
        of = self._costs.verify
        return (of(self.batch_size, high) - of(self.batch_size, low)) / (high - low)


def _rate(partition: Partition) -> float:
    return partition.rate
