"""Decides how long the engine waits for a draft's answers, and when a silent draft counts as faulty."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import ProposalRow

WARMING_PATIENCE = 5.0
"""Fault deadlines that a draft may take to open a session, as long as it answers pings."""


@dataclass(slots=True)
class AnswerDeadlines:
    """Deadlines for answers of one draft. Engine thread only. Times are `time.monotonic()`.

    The engine waits in one round for the first answer of a new session, but no longer: the draft may be
    computing the prompt, or may have stopped. In later rounds it only uses trees that have arrived meanwhile.
    A slow prompt on the draft therefore delays no further round.

    Attributes:
        fault_deadline_s: A draft that owes an answer for longer is faulty.
        heard_s: When the last message arrived, not counting answered pings.
        owed_s: Since when a first answer is owed and no message has arrived, for any session, even one that
            has ended since; None if none is owed.
    """

    fault_deadline_s: float
    heard_s: float = 0.0
    owed_s: float | None = None

    def asked(self, now: float) -> None:
        """Record that a tree was requested for a session that has had no answer yet."""
        if self.owed_s is None:
            self.owed_s = now

    def heard(self, now: float) -> None:
        """Record the arrival of a message."""
        self.heard_s, self.owed_s = now, None

    def until(
        self, row: ProposalRow, session: DraftSession, started: float, deadline_s: float | None, pong_s: float
    ) -> float:
        """Return the time until which to wait for a row's answer.

        Args:
            row: The requested row.
            session: Its session.
            started: When this wait began.
            deadline_s: How long waiting can pay off; None for no deadline.
            pong_s: When the draft last answered a ping.
        """
        if deadline_s is not None and not row.must_wait:
            return started if session.in_vain else started + deadline_s
        return started + self.fault_deadline_s if session.warm else self._opened_by(started, pong_s)

    def is_over(self, now: float, pong_s: float) -> bool:
        """Return True if the draft owes first answers and has shown no life for a fault deadline."""
        return self.owed_s is not None and now >= max(self.owed_s, pong_s) + self.fault_deadline_s

    def _opened_by(self, since: float, pong_s: float) -> float:
        return min(
            max(since, self.heard_s, pong_s) + self.fault_deadline_s,
            since + WARMING_PATIENCE * self.fault_deadline_s,
        )
