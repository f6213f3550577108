"""Decides how long the engine waits for a draft's answers, and when a silent draft counts as faulty."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.services.target.draft_client.answer_times import AnswerTimes
from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import AWAITED

WARMING_PATIENCE = 5.0
"""Longest time to open a session for a draft that answers pings, as a multiple of the fault deadline."""
TURN_S = 0.02
"""Longest uninterrupted wait, in seconds, of a round in which all rows wait for the draft.

After this time, the engine checks for new requests and cancellations, and then waits again.
"""


@dataclass(slots=True)
class AnswerDeadlines:
    """Deadlines for the answers of one draft service. Engine thread only. Times are from `time.monotonic()`.

    A sequence in mode `auto` waits for its tree until the deadline of the `ProposalRequest`, but for at most
    `AnswerTimes.exchange_s`. A sequence in mode `on` waits for at most `AnswerTimes.limit_s`. If the round
    has other sequences, the round may start without the sequence in mode `on`.

    Only one round waits for the first answer of a new session, because the draft may still be computing the
    prompt. A slow prompt at the draft therefore delays only one round.

    Attributes:
        fault_deadline_s: Seconds after which an outstanding answer makes the draft faulty.
        heard_s: Arrival time of the draft's last message that was not a pong.
        owed_s: Time of the first request after `heard_s` in a session that the draft has never answered. The
            session may have ended since then. None if there is no such request.
        times: Measured times of answers and of rounds on the device. First answers of sessions are left out.
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
        """Record how long the session's last requested tree took. Do not record a session's first tree."""
        if session.warm and session.wanted is not None:
            self.times.in_time(now - session.asked_s, now)
        elif session.warm and session.owes:
            self.times.late(now - session.asked_s, now)

    def auto_until(self, session: DraftSession, started: float, deadline_s: float) -> float:
        """Return the time until which a round waits for the tree of a sequence with a deadline (mode `auto`).

        Args:
            session: The draft's session of the sequence.
            started: Time at which the round began to wait.
            deadline_s: Longest wait, in seconds, after which a tree can still save time.
        """
        return started if session.in_vain else started + min(deadline_s, self.times.exchange_s)

    def row_until(self, session: DraftSession, pong_s: float) -> float:
        """Return the time at which a sequence without a deadline (mode `on`) stops waiting for its tree.

        The wait may last several rounds.

        Args:
            session: The draft's session of the sequence.
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
        """Return the time until which one round waits for a sequence without a deadline (mode `on`).

        Args:
            session: The draft's session of the sequence.
            started: Time at which the round began to wait.
            has_others: True if the round has sequences that can go on without this sequence.
            others_wait: True if these other sequences may wait for this sequence.
        """
        if not has_others:
            return started + TURN_S
        # Other rows never wait for a session's first tree, or for a tree that an earlier round has left
        # behind.
        others_wait = others_wait and session.warm and session.reason != AWAITED
        return started + (self.times.others_s if others_wait else 0.0)

    def is_over(self, now: float, pong_s: float) -> bool:
        """Return True if the draft owes a first answer and has been silent for a whole fault deadline."""
        return self.owed_s is not None and now >= max(self.owed_s, pong_s) + self.fault_deadline_s
