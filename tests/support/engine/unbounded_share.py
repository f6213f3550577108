"""Takes the bound of `FixedShare` out of an engine, so that every row of a fixed shape drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.services.target.policy.fixed_share import FixedShare


class UnboundedShare(FixedShare):
    """Lets every row of a fixed shape draft, however long its round takes."""

    def choose(self, rows: list[int], base_s: float, round_s: Callable[[Sequence[int]], float]) -> set[int]:
        return set(rows)
