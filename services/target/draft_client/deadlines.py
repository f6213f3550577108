"""Decides how long the engine waits for a draft's answers, and when a silent draft counts as faulty."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import ProposalRow

WARMING_PATIENCE = 5.0
"""Longest time to open a session, as a multiple of the fault deadline, for a draft that answers pings."""


@dataclass(slots=True)
class AnswerDeadlines:
    """Deadlines for the answers of one draft. Engine thread only. Times are values of `time.monotonic()`.

    The engine waits for the first answer of a new session in one round only, because the draft may be
    computing the prompt or may have stopped. Later rounds do not wait until the session has had its first
    answer, so a prompt that the draft computes slowly delays only one round.

    Attributes:
        fault_deadline_s: Time in seconds after which an outstanding answer makes the draft faulty.
        heard_s: Time at which the last message other than a pong arrived.
        owed_s: Time of the earliest request that was sent after the last message arrived, for a session
            without an answer. The request counts even if the session has ended since. None if there is no
            such request.
    """

    fault_deadline_s: float
    heard_s: float = 0.0
    owed_s: float | None = None

    def asked(self, now: float) -> None:
        """Record a request for a tree in a session that has had no answer yet."""
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
            session: The session of the row.
            started: Time at which this wait began.
            deadline_s: Longest wait that can pay off, in seconds. None sets no deadline.
            pong_s: Time at which the draft last answered a ping.
        """
        if deadline_s is not None and not row.must_wait:
            return started if session.in_vain else started + deadline_s
        return started + self.fault_deadline_s if session.warm else self._opened_by(started, pong_s)

    def is_over(self, now: float, pong_s: float) -> bool:
        """Return True if the draft owes first answers and has been silent for a whole fault deadline."""
        return self.owed_s is not None and now >= max(self.owed_s, pong_s) + self.fault_deadline_s

    def _opened_by(self, since: float, pong_s: float) -> float:
        return min(
            max(since, self.heard_s, pong_s) + self.fault_deadline_s,
            since + WARMING_PATIENCE * self.fault_deadline_s,
        )
