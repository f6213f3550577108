"""Limits the time that trees of fixed shapes add to the rounds that all requests share.

In mode `on`, a client may request a large tree in every round. Such a tree makes the round longer for all
requests of the batch. On average, trees of fixed shapes may at most double the estimated time of a round. A
credit, in seconds, enforces this limit:

- Each round adds `ROUND_LIMIT - 1` times its estimated time without these trees.
- Each round subtracts the estimated time of the trees of fixed shapes that it drafts.
- If the credit does not suffice for the trees of all requests, the requests take turns.
- A tree that costs more than the full credit still gets a turn. Afterwards, no request with a fixed shape
  drafts until the credit is positive again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

ROUND_LIMIT = 2.0
"""Longest average round with trees of fixed shapes, as a multiple of the round without them."""
ROUNDS_PER_TURN = 8
"""Number of rounds that a turn lasts, because a remote draft must start its rounds again after each turn."""


class FixedShare:
    """Chooses the entries of fixed shapes that draft in a round. Engine thread only."""

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._number = 0
        self._turns: dict[int, int] = {}
        self._session_ids: list[int] = []
        self._chosen: list[int] = []
        self._left = 0

    def choose(self, session_ids: list[int], base_s: float, round_s: Callable[[Seq[int]], float]) -> set[int]:
        """From the requests with a fixed tree shape, choose those that draft in this round.

        Args:
            session_ids: Session ids of these requests.
            base_s: Estimated seconds of the round without the trees of these requests.
            round_s: Function that returns the estimated seconds of the round if the given requests draft. The
                estimate grows with the number of requests.
        """
        allowance_s = (ROUND_LIMIT - 1.0) * base_s
        self._credit_s = min(self._credit_s + allowance_s, allowance_s)
        if self._left and session_ids == self._session_ids:
            self._left -= 1
        else:
            self._take_turns(session_ids, lambda chosen: round_s(chosen) - base_s, allowance_s)
        if self._chosen:
            self._credit_s -= max(0.0, round_s(self._chosen) - base_s)
        return set(self._chosen)

    def _take_turns(
        self, session_ids: list[int], cost_s: Callable[[Seq[int]], float], allowance_s: float
    ) -> None:
        """Begin new turns with the requests whose last turn is longest ago."""
        order = sorted(session_ids, key=lambda session_id: self._turns.get(session_id, 0))
        # Find the largest number of requests for which the credit suffices, by bisection.
        count, too_many = 0, len(order) + 1
        middle = len(order)
        while too_many - count > 1:
            if cost_s(order[:middle]) <= self._credit_s:
                count = middle
            else:
                too_many = middle
            middle = (count + too_many) // 2
        if not count and self._credit_s >= allowance_s:
            count = 1
        self._session_ids, self._chosen = session_ids, order[:count]
        self._left = ROUNDS_PER_TURN - 1 if count else 0
        self._number += 1
        self._turns = {
            session_id: self._number if place < count else self._turns.get(session_id, 0)
            for place, session_id in enumerate(order)
        }
