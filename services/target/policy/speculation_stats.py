"""Counts one request's rounds, accepted tokens and fallbacks, and reports these counters."""

from __future__ import annotations

from outrider.shared.base.generation import SpeculationReport


class SpeculationStats:
    """Counters of one request's speculation.

    ``histogram[k]`` is the number of rounds that accepted k draft tokens. Three identities always hold:

    - ``sum((k + 1) * histogram[k]) == completion tokens - tokens emitted by prefills + tokens cut``
    - ``sum(histogram) == rounds``
    - ``accepted_tokens == sum(k * histogram[k])``

    ``accept_length`` is the mean number of tokens per round, before tokens are cut at a stop token or the
    length limit. Only rounds that verified at least one draft node count. Without such rounds, it is 1.0.
    """

    __slots__ = (
        "accepted_tokens",
        "draft_rounds",
        "draft_tokens",
        "fallbacks",
        "histogram",
        "reason",
        "rounds",
        "tokens_cut",
    )

    def __init__(self) -> None:
        self.rounds = 0
        self.draft_rounds = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.tokens_cut = 0
        self.histogram: list[int] = [0]
        self.fallbacks: dict[str, int] = {}
        # Of the last planned round: why it has no draft, or the reason of the controller's decision.
        self.reason = ""

    def record(self, num_nodes: int, num_accepted: int, num_cut: int) -> None:
        """Count a round that verified `num_nodes` nodes, including the root."""
        self.rounds += 1
        self.tokens_cut += num_cut
        if num_nodes > 1:
            self.draft_rounds += 1
            self.draft_tokens += num_nodes - 1
            self.accepted_tokens += num_accepted
        while len(self.histogram) <= num_accepted:
            self.histogram.append(0)
        self.histogram[num_accepted] += 1

    def fell_back(self, reason: str) -> None:
        """Count a round that requested draft nodes and got none."""
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1
        self.reason = reason

    def merge(self, other: SpeculationStats) -> None:
        """Add another request's counters."""
        self.rounds += other.rounds
        self.draft_rounds += other.draft_rounds
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.tokens_cut += other.tokens_cut
        self.histogram += [0] * (len(other.histogram) - len(self.histogram))
        for accepted, count in enumerate(other.histogram):
            self.histogram[accepted] += count
        for reason, count in other.fallbacks.items():
            self.fallbacks[reason] = self.fallbacks.get(reason, 0) + count

    @property
    def accept_length(self) -> float:
        """Mean tokens per round, over the rounds that verified at least one draft node."""
        return 1.0 + self.accepted_tokens / self.draft_rounds if self.draft_rounds else 1.0

    def report(self, speedup_estimate: float | None = None, plain_by: str = "") -> SpeculationReport:
        """Return a snapshot of the counters, with the most frequent reason for fallbacks to plain decoding.

        Args:
            speedup_estimate: The speculation controller's estimate of the speedup. None if there is no
                estimate.
            plain_by: The party that chose plain decoding. The report contains this value as the reason if all
                rounds ran without drafts and none of them was a fallback.
        """
        reason = plain_by if self.rounds and not self.draft_rounds else ""
        if self.fallbacks:
            reason = max(self.fallbacks, key=lambda name: self.fallbacks[name])
        return SpeculationReport(
            accept_length=self.accept_length,
            rounds=self.rounds,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            accepted_histogram=tuple(self.histogram) if self.rounds else (),
            fallback_reason=reason,
            speedup_estimate=speedup_estimate,
        )
