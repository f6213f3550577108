"""Counts the rounds whose tokens a client receives.

After a stop string, the target may finish a further round before it learns of the end of the text. The
target's own statistics contain this round, although none of its tokens reach the client.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from outrider.shared.base.generation import SpeculationReport


@dataclass(slots=True)
class RoundTally:
    """Speculation counters of the delivered part of one sequence.

    Attributes:
        draft_tokens: Number of draft nodes that the delivered rounds verified.
        draft_rounds: Number of delivered rounds with draft nodes.
        histogram: Element k is the number of delivered rounds in which k draft nodes were accepted.
    """

    draft_tokens: int = 0
    draft_rounds: int = 0
    histogram: list[int] = field(default_factory=list)

    def add(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Count rounds, each with its numbers of verified and of accepted draft nodes."""
        for drafted, accepted in rounds:
            self.draft_tokens += drafted
            self.draft_rounds += drafted > 0
            self.histogram += [0] * (accepted + 1 - len(self.histogram))
            self.histogram[accepted] += 1

    def report(self, end: SpeculationReport | None = None) -> SpeculationReport:
        """Return the counters as a report.

        Args:
            end: The target's statistics of the whole sequence, which contain the reason for rounds without
                drafts and the estimated speedup. None if the sequence continues.
        """
        accepted_tokens = sum(accepted * rounds for accepted, rounds in enumerate(self.histogram))
        return replace(
            end or SpeculationReport(),
            accept_length=1.0 + accepted_tokens / self.draft_rounds if self.draft_rounds else 1.0,
            rounds=sum(self.histogram),
            draft_tokens=self.draft_tokens,
            accepted_tokens=accepted_tokens,
            accepted_histogram=tuple(self.histogram),
        )
