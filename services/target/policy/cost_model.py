"""Estimates the duration of a round, in seconds, from executed rounds.

    round = drafts (one per tree shape)  +  verify pass (batch size, rows)  +  rest

In this module, a row is one tree node of the verify pass. Rows are counted over all sequences and include the
roots. Each part of a round is estimated from measured times (`Estimate`). There is one estimate for:

- drafts of each combination of depth, type (tree or chain) and bucket of batch sizes;
- plain verify passes of each batch size;
- other verify passes of each combination of batch bucket and rows;
- the rest, i.e. the idle time of the device between two rounds, for each batch bucket, with or without
  drafts.

Batch buckets are powers of 2. The times of sizes that were never executed are interpolated or extrapolated.

An estimate is *unsure* if it has few or only old measurements. The estimates of larger work limit an unsure
estimate. The estimate for a pass is at most the estimate for a pass over more rows. The estimate for a draft
is at most the estimate for a deeper draft or for more sequences. The rest of a round with drafts is at most
the rest of a round without drafts, and the reverse. Without these limits, one slow measurement could end the
use of a shape or of plain decoding, which would then never be measured again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import chain
from typing import TypeVar

from outrider.services.target.policy.estimate import Estimate
from outrider.shared.engine.buckets import power_of_2
from outrider.shared.spec.tree import DraftShape

UNSEEN_ROW_COST = 0.03
"""Assumed cost of one more row per sequence until larger passes are measured, as a share of a plain pass."""
UNSEEN_LEVEL_COST = 0.06
"""Assumed cost of one draft level until drafts have been measured, as a share of a plain pass."""
FIXED_DRAFT_SHARE = 0.3
"""Share of a draft's time that does not grow with depth. Used to scale a time to another depth."""
WAITS_KEPT = 128
SHORTEST_S = 1e-7
"""Smallest estimate of a round, because a coarse clock may measure a time of 0."""


class DraftPath(Enum):
    """Where the trees of a round come from. The cost of several tree shapes in one round depends on the path.

    - DEVICE: A drafter on the target's device, or a drafter in another process whose trees stay on the
      devices. Each tree shape needs a separate draft.
    - HOST: The host, which requests all trees together. The deepest tree shape determines the time.
    """

    DEVICE = "device"
    HOST = "host"


_Key = TypeVar("_Key", int, tuple[int, bool])

Groups = Mapping[DraftShape, int]
"""Number of sequences that draft with each shape."""


class StepCosts:
    """Durations in seconds, learned from executed rounds."""

    def __init__(self) -> None:
        self._now = 0
        self._plain: dict[int, Estimate] = {}
        self._verify: dict[int, dict[int, Estimate]] = {}
        self._draft: dict[tuple[int, bool], dict[int, Estimate]] = {}
        self._rest: dict[tuple[int, bool], Estimate] = {}
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self._wait_p99: float | None = None

    # ---- learn

    def observe_verify(self, batch_size: int, rows: int, seconds: float) -> None:
        """Record a verify pass over `rows` nodes of `batch_size` sequences."""
        if rows == batch_size:
            self._measure(self._plain, batch_size, seconds)
            return
        self._measure(self._verify.setdefault(power_of_2(batch_size), {}), _size_class(rows), seconds)

    def observe_drafts(self, groups: Groups, path: DraftPath, seconds: float) -> None:
        """Record how long the drafts of a round took."""
        if not groups:
            return
        parts = {shape: self.draft(shape, count) for shape, count in groups.items()}
        if path is DraftPath.HOST:
            deepest = max(groups, key=lambda shape: shape.depth)
            groups, parts = {deepest: sum(groups.values())}, {deepest: parts[deepest]}
        # Only the total time of several drafts is known, so each draft gets its expected share.
        total = sum(parts.values())
        for shape, count in groups.items():
            known = self._draft.setdefault((shape.depth, shape.topk == 1), {})
            share = parts[shape] / total if total else 1 / len(parts)
            self._measure(known, power_of_2(count), seconds * share)

    def observe_rest(self, batch_size: int, drafts: bool, seconds: float) -> None:
        """Record how much longer a round took than its drafts and its verify pass together."""
        self._measure(self._rest, (power_of_2(batch_size), drafts), max(seconds, 0.0))

    def observe_answer(self, seconds: float) -> None:
        """Record the time from a proposal's announcement to its arrival."""
        self._waits.append(seconds)
        self._wait_p99 = None

    def age(self) -> None:
        """Make all estimates one decision older. Called once for each decision."""
        self._now += 1

    def _measure(self, estimates: dict[_Key, Estimate], key: _Key, seconds: float) -> None:
        known = estimates.get(key)
        if known is None:
            estimates[key] = Estimate(seconds, self._now)
        else:
            known.observe(seconds, self._now)

    # ---- estimate

    @property
    def num_answers(self) -> int:
        """Number of recent proposals whose times are known."""
        return len(self._waits)

    @property
    def answer_p99(self) -> float | None:
        """99th percentile of the times of recent proposals; None before the first."""
        if self._wait_p99 is None and self._waits:
            ordered = sorted(self._waits)
            self._wait_p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return self._wait_p99

    @property
    def measured_plain(self) -> bool:
        """True if a plain pass was measured, of any batch size."""
        return bool(self._plain)

    def knows_plain(self, batch_size: int) -> bool:
        """Return True if a plain pass was measured in this batch bucket."""
        bucket = power_of_2(batch_size)
        return any(power_of_2(known) == bucket for known in self._plain)

    def plain(self, batch_size: int) -> float | None:
        """Return the estimated duration, in seconds, of a verify pass without drafts at this batch size.

        If this size has not been measured, interpolate between the nearest measured sizes. Before the first
        pass without drafts, return the duration of the shortest verify pass. Return None if no verify pass
        has been measured.
        """
        if batch_size in self._plain:
            return self._plain_s(batch_size)
        if not self._plain:  # if some rows always draft, no pass is plain
            passes = [one.seconds for by_rows in self._verify.values() for one in by_rows.values()]
            return min(passes, default=None)
        below = max((size for size in self._plain if size < batch_size), default=None)
        above = min((size for size in self._plain if size > batch_size), default=None)
        if below is None or above is None:
            return self._plain_s(below or above or 0)
        low, high = self._plain_s(below), self._plain_s(above)
        return low + (high - low) * (batch_size - below) / (above - below)

    def _plain_s(self, batch_size: int) -> float:
        """Return the estimate for a batch size that has been measured."""
        by_rows = self._verify.get(power_of_2(batch_size), {})
        larger = chain(
            (one for size, one in self._plain.items() if size >= batch_size),
            (one for rows, one in by_rows.items() if rows > batch_size),
        )
        return self._bounded(self._plain[batch_size], larger)

    def most_rows(self, batch_size: int) -> int:
        """Return the rows of the largest pass measured in this batch bucket, but at least `batch_size`."""
        return max(*self._verify.get(power_of_2(batch_size), {}), batch_size, 1)

    def round(self, batch_size: int, rows: int, groups: Groups, path: DraftPath) -> float:
        """Estimate the duration of a round in seconds.

        Args:
            batch_size: Number of sequences.
            rows: Number of tree nodes of all sequences.
            groups: Number of sequences that draft with each tree shape.
            path: Where the trees come from.
        """
        drafting_s = self.drafts(groups, path)
        rest_s = self.rest(batch_size, any(groups.values()))
        return max(SHORTEST_S, drafting_s + self.verify(batch_size, rows) + rest_s)

    def drafts(self, groups: Groups, path: DraftPath) -> float:
        """Estimate the duration of the drafts of a round."""
        drafts = [self.draft(shape, count) for shape, count in groups.items() if count]
        return max(drafts, default=0.0) if path is DraftPath.HOST else sum(drafts)

    def rest(self, batch_size: int, drafts: bool) -> float:
        """Estimate how much longer a round takes than its drafts and its verify pass together."""
        bucket = power_of_2(batch_size)
        known = [self._rest[key] for key in ((bucket, drafts), (bucket, not drafts)) if key in self._rest]
        return self._bounded(known[0], known) if known else 0.0

    def verify(self, batch_size: int, rows: int) -> float:
        """Estimate the duration of a verify pass, interpolated between the plain pass and measured passes."""
        plain = self.plain(batch_size)
        if plain is None:
            return 1.0 + UNSEEN_ROW_COST * rows
        if rows <= batch_size:
            return plain
        by_rows = self._verify.get(power_of_2(batch_size), {})
        lower, upper = batch_size, 0
        for known in by_rows:
            if lower < known <= rows:
                lower = known
            elif known > rows and (not upper or known < upper):
                upper = known
        lower_s = plain if lower == batch_size else self._pass_s(by_rows, lower)
        if upper:
            upper_s = self._pass_s(by_rows, upper)
            return max(plain, lower_s + (upper_s - lower_s) * (rows - lower) / (upper - lower))
        slope = plain * UNSEEN_ROW_COST / batch_size
        if lower > batch_size:
            slope = max(0.0, lower_s - plain) / (lower - batch_size)
        return max(plain, lower_s) + slope * (rows - lower)

    def _pass_s(self, by_rows: Mapping[int, Estimate], rows: int) -> float:
        return self._bounded(by_rows[rows], (one for other, one in by_rows.items() if other >= rows))

    def draft(self, shape: DraftShape, count: int) -> float:
        """Estimate the duration of a draft for `count` sequences."""
        if not self._draft:
            return UNSEEN_LEVEL_COST * shape.depth * (self.plain(count) or 0.0)
        form = shape.topk == 1
        key = min(self._draft, key=lambda known: (known[1] != form, abs(known[0] - shape.depth)))
        by_count = self._draft[key]
        size = power_of_2(count)
        if size not in by_count:
            size = min(by_count, key=lambda known: abs(known.bit_length() - size.bit_length()))
        depth, is_chain = key
        # A draft of a tree does at least the work of a chain of the same depth.
        larger = (
            one
            for (other, form), held in self._draft.items()
            if other >= depth and form <= is_chain
            for number, one in held.items()
            if number >= size
        )
        growth = FIXED_DRAFT_SHARE + (1 - FIXED_DRAFT_SHARE) * shape.depth / depth
        return self._bounded(by_count[size], larger) * growth

    def doubts(self, batch_size: int, rows: int, shape: DraftShape) -> bool:
        """Return True if passes of this size or drafts of this shape were measured, but too few times.

        Args:
            batch_size: Number of sequences.
            rows: Number of tree nodes of all sequences.
            shape: A tree shape, or `NO_DRAFT`.
        """
        if rows == batch_size:
            verify = self._plain.get(batch_size)
        else:
            verify = self._verify.get(power_of_2(batch_size), {}).get(_size_class(rows))
        drafts = self._draft.get((shape.depth, shape.topk == 1), {})
        measured = [one for one in (verify, *drafts.values()) if one is not None]
        return any(not one.is_sure(self._now) for one in measured)

    def _bounded(self, one: Estimate, larger: Iterable[Estimate]) -> float:
        """Return an estimate. If it is unsure, return at most the shortest estimate of larger work."""
        if one.is_sure(self._now):
            return one.seconds
        return min(one.seconds, *(known.seconds for known in larger))


def _size_class(rows: int) -> int:
    """Round a number of rows up, so that passes of similar sizes share an average."""
    step = 1 if rows <= 32 else 8 if rows <= 256 else 32
    return -(-rows // step) * step
