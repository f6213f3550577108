"""How long answers of a draft are waited for: never longer than waiting can pay, and once where there was none before."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import ProposalRow

WARMING_PATIENCE = 5.0
"""A draft that shows life may take this many fault deadlines to open a session."""


@dataclass(slots=True)
class AnswerDeadlines:
    """Belongs to the engine thread. Times are of the monotonic clock.

    A session that the draft has not answered for yet (it may be computing the prompt, or be stopped) is waited for in one round, no more:
    in the rounds after that the trees that came meanwhile are looked at. So the draft may take its time, and costs none.

    Attributes:
        fault_deadline_s: A draft that owes an answer for longer is faulty.
        heard_s: When the last message came, signs of life on other streams apart.
        owed_s: Since when a first answer is owed and no message has come, for whichever sessions; they may have ended since.
    """

    fault_deadline_s: float
    heard_s: float = 0.0
    owed_s: float | None = None

    def asked(self, now: float) -> None:
        """A session was asked for that has had no answer yet."""
        if self.owed_s is None:
            self.owed_s = now

    def heard(self, now: float) -> None:
        """A message came."""
        self.heard_s, self.owed_s = now, None

    def until(
        self, row: ProposalRow, session: DraftSession, started: float, deadline_s: float | None, pong_s: float
    ) -> float:
        """Return until when a row's answer is waited for.

        Args:
            row: Asked for.
            session: Its session.
            started: When this wait began.
            deadline_s: What waiting can pay for; None: as long as it takes.
            pong_s: When the draft last answered a ping.
        """
        if deadline_s is not None and not row.must_wait:
            return started if session.in_vain else started + deadline_s
        return started + self.fault_deadline_s if session.warm else self._opened_by(started, pong_s)

    def is_over(self, now: float, pong_s: float) -> bool:
        """Whether a draft that is not waited for has shown no life for so long, though it owes first answers, that it is faulty."""
        return self.owed_s is not None and now >= max(self.owed_s, pong_s) + self.fault_deadline_s

    def _opened_by(self, since: float, pong_s: float) -> float:
        return min(
            max(since, self.heard_s, pong_s) + self.fault_deadline_s,
            since + WARMING_PATIENCE * self.fault_deadline_s,
        )
