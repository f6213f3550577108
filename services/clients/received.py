"""Counts tokens and rounds of an answer as they arrive, for answers that are cut off before their end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PREFILL_TOKENS = 1
"""Tokens of an answer that come from the prefill of its prompt, not from a round."""


@dataclass(slots=True)
class ReceivedTrace:
    """Counts the pieces of one streamed answer.

    Attributes:
        pieces: Number of pieces.
        emitted: Tokens of the answer in all rounds.
        rounds: Number of rounds; 0 if the request asked for no trace.
        drafting: Number of rounds with drafts.
        drafted, accepted: Drafted and accepted tokens in all rounds.
    """

    pieces: int = 0
    emitted: int = 0
    rounds: int = 0
    drafting: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, trace: dict[str, Any] | None) -> None:
        """Count a piece. `trace` is its round, or None if it has no round."""
        self.pieces += 1
        if trace is None:
            return
        self.rounds += 1
        self.emitted += len(trace["emitted_text"])
        drafted = len(trace["nodes"]) - 1
        if drafted > 0:
            self.drafting += 1
            self.drafted += drafted
            self.accepted += len(trace["accepted"])

    @property
    def tokens(self) -> int:
        """Number of received tokens. Without rounds, each piece counts as one token."""
        return PREFILL_TOKENS + self.emitted if self.rounds else self.pieces

    def as_speculation(self) -> dict[str, Any]:
        """Return the numbers of the rounds, with the names of the server's `speculation` object.

        The dictionary is empty if there is no round.
        """
        if not self.rounds:
            return {}
        return {
            "rounds": self.rounds,
            "draft_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "accept_length": 1 + self.accepted / self.drafting if self.drafting else 1.0,
        }
