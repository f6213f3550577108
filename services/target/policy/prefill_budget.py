"""Limits the prompt tokens of a step, so that running streams pause only briefly while a prompt prefills."""

from __future__ import annotations

FIRST_RATE = 20_000.0
"""Assumed prompt tokens per second until a pass has been measured."""
LEAST_TOKENS = 64
"""Smallest limit, so that a prompt always advances."""
LEAST_MEASURED = 64
"""Passes over fewer tokens are not measured, because their time hardly depends on the number of tokens."""
WEIGHT = 0.3
"""Weight of a new measurement in the moving average."""
LARGEST_RISE = 4.0
"""Largest factor by which one measurement may raise the average. A single slow pass may have another cause,
for example the compilation of a kernel."""


class PrefillBudget:
    """Converts the time budget of an engine step to a number of prompt tokens. Engine thread only.

    The time per token grows with the context, so it is measured separately for each power of two of the
    context length. The time per token falls with the number of tokens of a pass, because every pass reads all
    weights. A short pass therefore gives only an upper bound for longer passes.

    Args:
        budget_s: Seconds that the prompt tokens of a step may take while other sequences decode.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._seconds_per_token: dict[int, float] = {}

    def tokens(self, context: int) -> int:
        """Return the number of prompt tokens that fit into the budget.

        Args:
            context: Number of tokens of the prompt whose K/V is already stored.
        """
        known, wanted = self._seconds_per_token, context.bit_length()
        nearest = min(known, key=lambda size: abs(size - wanted), default=None)
        seconds = 1.0 / FIRST_RATE if nearest is None else known[nearest]
        return max(LEAST_TOKENS, int(self._budget_s / seconds))

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """Learn the time per prompt token from a finished pass.

        Args:
            tokens: Number of prompt tokens of the pass.
            context: Largest context of the pass in tokens, including the pass's own tokens.
            seconds: Duration of the pass.
        """
        if tokens < LEAST_MEASURED or seconds <= 0:
            return
        size, measured = context.bit_length(), seconds / tokens
        old = self._seconds_per_token.get(size)
        if old is None:
            self._seconds_per_token[size] = measured
            return
        if measured > old and 2 * tokens < self._budget_s / old and seconds <= self._budget_s:
            return  # a longer pass takes less time per token
        self._seconds_per_token[size] = old + WEIGHT * (min(measured, LARGEST_RISE * old) - old)
