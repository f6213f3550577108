"""Waits for the draft's trees until each row's deadline, and decides what happens when an answer is late.

- A row whose answer is late gets no drafts in this round. The reason is "warming" if the draft has never
  answered for the row's session, and "late" otherwise.
- The draft counts as faulty if a late row has no deadline, or if the draft has been silent for too long.
- Otherwise, the circuit breaker counts a miss if the draft has answered for the late row's session before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from outrider.services.target.draft_client.breaker import Breaker
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.deadlines import AnswerDeadlines
from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import ProposalRow

_log = logging.getLogger("outrider.target.draft")


class AnswerWait:
    """Waits for the trees of one draft. Engine thread only.

    Args:
        deadlines: Determines how long to wait for each row.
        breaker: Counts missed deadlines.
        connection: Function that returns the current connection, or None.
        take_reply: Function that waits up to the given number of seconds for a message and processes the
            message.
        on_fault: Called when the draft is faulty.
    """

    def __init__(
        self,
        deadlines: AnswerDeadlines,
        breaker: Breaker,
        connection: Callable[[], Connection | None],
        take_reply: Callable[[Connection, float], bool],
        on_fault: Callable[[], None],
    ) -> None:
        self._deadlines = deadlines
        self._breaker = breaker
        self._connection = connection
        self._take_reply = take_reply
        self._on_fault = on_fault

    def run(self, awaited: list[tuple[ProposalRow, DraftSession]], deadline_s: float | None) -> bool:
        """Process messages until every awaited row has an answer or its deadline has passed.

        Returns:
            False if a late answer counts against the draft.
        """
        started = time.monotonic()
        while (connection := self._connection()) is not None:
            open_rows = [
                (row, session)
                for row, session in awaited
                if session.wanted is not None and session.tree is None
            ]
            if not open_rows:
                break
            pong_s = connection.last_sign_s
            until = max(
                self._deadlines.until(row, session, started, deadline_s, pong_s) for row, session in open_rows
            )
            remaining = until - time.monotonic()
            if remaining <= 0:
                return self._give_up(open_rows, deadline_s is None, pong_s)
            self._take_reply(connection, remaining)
        return True

    def _give_up(
        self, open_rows: list[tuple[ProposalRow, DraftSession]], patient: bool, pong_s: float
    ) -> bool:
        """End a wait in which answers were missing. Return False if one of them counts against the draft."""
        now = time.monotonic()
        for _row, session in open_rows:
            session.reason = "late" if session.warm else "warming"
            session.wanted = None
            session.in_vain = not session.warm
        if (
            patient
            or any(row.must_wait for row, _session in open_rows)
            or self._deadlines.is_over(now, pong_s)
        ):
            _log.warning(
                "the draft has owed an answer for %.1f s; decoding without drafts until it shows life",
                self._deadlines.fault_deadline_s,
            )
            self._on_fault()
            return False
        # Opening a session may take long, so only a late answer for an open session counts as a miss.
        late = any(session.warm for _row, session in open_rows)
        if late:
            self._breaker.miss(now)
        return not late
