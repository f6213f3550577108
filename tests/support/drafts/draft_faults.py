"""Faults of a draft in a process of its own, in the middle of mixed rounds."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from support.drafts.draft_process import DraftProcess

STOP_STEPS, RUN_STEPS = 6, 20
"""Numbers of steps for which a draft that stops now and then is stopped and runs."""


class Fault:
    """A fault of the draft, from the first exchanged round with several groups on.

    Args:
        draft: The draft.
        kind: What happens: "killed", "stopped", "pulsing" (stopped now and then) or "garbage".
        groups: Number of groups of each exchanged round so far.
    """

    def __init__(self, draft: DraftProcess, kind: str, groups: Sequence[int]) -> None:
        self._draft = draft
        self._kind = kind
        self._groups = groups
        self._steps = 0

    def strike(self) -> bool:
        """Cause the fault if it is due. Return True if it has happened."""
        if max(self._groups, default=0) < 2:
            return False
        step, self._steps = self._steps, self._steps + 1
        if self._kind == "pulsing":
            step %= STOP_STEPS + RUN_STEPS
            if step == STOP_STEPS:
                self._draft.send_signal(signal.SIGCONT)
        number = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "pulsing": signal.SIGSTOP}
        if step == 0 and self._kind in number:
            self._draft.send_signal(number[self._kind])
        return True
