"""Decides how long the engine waits for a draft's answers, and when a silent draft counts as faulty."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.services.target.draft_client.answer_times import AnswerTimes
from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import AWAITED

WARMING_PATIENCE = 5.0
"""Longest time to open a session, as a multiple of the fault deadline, for a draft that answers pings."""
TURN_S = 0.02
"""Longest time in seconds for which a round without other rows waits at once.

Then the engine looks for new requests and cancellations, and waits again.
"""


@dataclass(slots=True)
class AnswerDeadlines:
    """Deadlines for the answers of one draft. Engine thread only. Times are values of `time.monotonic()`.

    A row in mode `auto` waits until the request's deadline. A row in mode `on` waits for at most
    `AnswerTimes.limit_s`. Other rows do not wait that long: their rounds go on without it.

    The engine waits for the first answer of a new session in one round only, because the draft may be
    computing the prompt or may have stopped. Later rounds do not wait until the session has had its first
    answer, so a prompt that the draft computes slowly delays only one round.

    Attributes:
        fault_deadline_s: Time in seconds after which an outstanding answer makes the draft faulty.
        heard_s: Time at which the last message other than a pong arrived.
        owed_s: Time of the earliest request that was sent after the last message arrived, for a session
            without an answer. The request counts even if the session has ended since. None if there is no
            such request.
        times: Measured times of answers, without the first answers of sessions, and of rounds on the device.
    """

    fault_deadline_s: float
    heard_s: float = 0.0
    owed_s: float | None = None
    times: AnswerTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = AnswerTimes(self.fault_deadline_s)

    def asked(self, now: float) -> None:
        """Record a request for a tree in a session that has had no answer yet."""
        if self.owed_s is None:
            self.owed_s = now

    def heard(self, now: float) -> None:
        """Record the arrival of a message."""
        self.heard_s, self.owed_s = now, None

    def answered(self, session: DraftSession, now: float) -> None:
        """Record how long the last requested tree of a session has taken, unless it is the first tree."""
        if session.warm and session.wanted is not None:
            self.times.in_time(now - session.asked_s)
        elif session.warm and session.owes:
            self.times.late(now - session.asked_s)

    def auto_until(self, session: DraftSession, started: float, deadline_s: float) -> float:
        """Return the time until which a round waits for the answer of a row with a deadline.

        Args:
            session: The session of the row.
            started: Time at which this wait began.
            deadline_s: Longest wait that can pay off, in seconds.
        """
        return started if session.in_vain else started + deadline_s

    def row_until(self, session: DraftSession, pong_s: float) -> float:
        """Return the time until which a row without a deadline waits, over all rounds.

        Args:
            session: The session of the row.
            pong_s: Time at which the draft last answered a ping.
        """
        asked_s = session.asked_s
        if session.warm:
            return asked_s + self.times.limit_s
        return min(
            max(asked_s, self.heard_s, pong_s) + self.fault_deadline_s,
            asked_s + WARMING_PATIENCE * self.fault_deadline_s,
        )

    def round_until(
        self, session: DraftSession, started: float, *, has_others: bool, others_wait: bool
    ) -> float:
        """Return the time until which one round waits for the answer of a row without a deadline.

        Args:
            session: The session of the row.
            started: Time at which this wait began.
            has_others: True if the round has rows that can go on without this row.
            others_wait: True if these rows may wait.
        """
        if not has_others:
            return started + TURN_S
        # No other row waits for the first trees of a session, or for trees that an earlier round has left.
        others_wait = others_wait and session.warm and session.reason != AWAITED
        return started + (self.times.others_s if others_wait else 0.0)

    def is_over(self, now: float, pong_s: float) -> bool:
        """Return True if the draft owes first answers and has been silent for a whole fault deadline."""
        return self.owed_s is not None and now >= max(self.owed_s, pong_s) + self.fault_deadline_s
