"""Waits for the draft's trees until each sequence's deadline, and decides what happens if an answer is late.

The rules depend on the speculation mode (`on` or `auto`) of each sequence of the round:

- In mode `on`, a sequence may wait longer than the round. The round then runs without the sequence. The
  sequence keeps waiting during the next rounds. Its fallback reason is `AWAITED`.
- Any other sequence whose tree is late decodes without drafts in this round. Its fallback reason is "warming"
  if the draft has not answered for the sequence's session yet. Otherwise, the reason is "late".
- The draft is faulty if a sequence in mode `on` has waited to its limit. The draft is also faulty if it has
  sent no message for too long.
- Any other late answer is a miss for the circuit breaker (`breaker`). A late first answer for a session is
  not a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.services.target.draft_client.breaker import Breaker
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.deadlines import AnswerDeadlines
from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import AWAITED, ProposalRequest, ProposalRow

_log = logging.getLogger("outrider.target.draft")

Awaited = tuple[ProposalRow, DraftSession]
"""A row that awaits a tree, and its session."""


class AnswerWait:
    """Waits for the trees that the target has requested from one draft service. Engine thread only.

    Args:
        deadlines: Determines how long to wait for the tree of each sequence.
        breaker: Circuit breaker that counts missed deadlines.
        connection: Function that returns the current connection to the draft. It returns None while there is
            none.
        take_reply: Function that waits for a message of the draft and processes it. Its argument is the
            longest wait in seconds.
        on_fault: Called when the draft is faulty. Its argument is the longest wait so far of a sequence
            without a deadline (speculation mode `on`), in seconds.
    """

    def __init__(
        self,
        deadlines: AnswerDeadlines,
        breaker: Breaker,
        connection: Callable[[], Connection | None],
        take_reply: Callable[[Connection, float], bool],
        on_fault: Callable[[float], None],
    ) -> None:
        self._deadlines = deadlines
        self._breaker = breaker
        self._connection = connection
        self._take_reply = take_reply
        self._on_fault = on_fault

    def run(self, awaited: Seq[Awaited], request: ProposalRequest) -> bool:
        """Process the draft's messages until every awaited tree has arrived, or until the round must start.

        Returns:
            False if a late answer was a miss for the circuit breaker, or a fault of the draft.
        """
        started, deadline_s = time.monotonic(), request.deadline_s
        if self._breaker.opening_budget.empty_s(started):
            for _row, session in awaited:
                session.in_vain = session.in_vain or not session.warm
        others_wait = not self._breaker.budget.empty_s(started)
        while (connection := self._connection()) is not None:
            still_open = [one for one in awaited if one[1].wanted is not None and one[1].tree is None]
            if not still_open:
                break
            pong_s = connection.last_sign_s
            patient = [session for row, session in still_open if _is_patient(row, deadline_s)]
            others = request.has_other_rows or len(patient) < len(request.rows)
            ends = [
                self._deadlines.auto_until(session, started, deadline_s)
                for row, session in still_open
                if deadline_s is not None and not row.must_wait
            ]
            for session in patient:
                of_round = self._deadlines.round_until(
                    session, started, has_others=others, others_wait=others_wait
                )
                ends.append(min(of_round, self._deadlines.row_until(session, pong_s)))
            remaining = max(ends) - time.monotonic()
            if remaining <= 0:
                return self._give_up(still_open, deadline_s, pong_s, started, others=others)
            self._take_reply(connection, remaining)
        return True

    def _give_up(
        self,
        still_open: Seq[Awaited],
        deadline_s: float | None,
        pong_s: float,
        started: float,
        *,
        others: bool,
    ) -> bool:
        """End a wait for missing answers. Return False if a missing answer counts against the draft."""
        now = time.monotonic()
        # 1. Rows in mode `on` may keep waiting while the next rounds run.
        waiting = [
            session
            for row, session in still_open
            if _is_patient(row, deadline_s) and now < self._deadlines.row_until(session, pong_s)
        ]
        late = [one for one in still_open if one[1] not in waiting]
        for session in waiting:
            session.reason = AWAITED
        for _row, session in late:
            session.give_up()
        # 2. Charge the time that other rows have waited in vain. A session may take long to open, so waits
        # for first answers have a budget of their own.
        if others:
            is_open = any(session.warm for _row, session in still_open)
            budget = self._breaker.budget if is_open else self._breaker.opening_budget
            budget.spend(now - started, now)
        # 3. Judge the draft.
        overdue = [session for row, session in late if _is_patient(row, deadline_s)]
        if overdue or self._deadlines.is_over(now, pong_s):
            waited_s = now - min((session.asked_s for session in overdue), default=now)
            _log.warning(
                "the draft has owed an answer for %.2f s; decoding without drafts until it shows life",
                waited_s or self._deadlines.fault_deadline_s,
            )
            self._on_fault(waited_s)
            return False
        missed = any(session.warm for _row, session in late)
        if missed:
            self._breaker.miss(now)
        return not missed


def _is_patient(row: ProposalRow, deadline_s: float | None) -> bool:
    return row.must_wait or deadline_s is None
