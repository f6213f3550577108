"""Waits of the draft's engine thread: it sleeps, or busy-polls if a message is due soon."""

from __future__ import annotations

import itertools

import pytest

from outrider.services.draft.serving import wakeup
from outrider.services.draft.serving.wakeup import SourceWakeUp

LOOK_S = 0.001


class Source:
    """A stream without data to read."""

    has_unsent = False

    def fileno(self) -> int:
        return 0

    def ready(self) -> None: ...


class Poll:
    """A fake poll object that records the timeouts of its calls."""

    def __init__(self) -> None:
        self.asked: list[float | None] = []

    def register(self, descriptor: int, events: int) -> None: ...

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        self.asked.append(timeout)
        return []


@pytest.mark.parametrize(("spin_s", "awake_s", "looks"), [(0.002, 0.0, 3), (0.002, 0.02, 20), (0.0, 0.02, 0)])
def test_it_sleeps_when_nothing_is_about_to_come(
    monkeypatch: pytest.MonkeyPatch, spin_s: float, awake_s: float, looks: int
) -> None:
    wake_up, poll = SourceWakeUp(), Poll()
    monkeypatch.setattr(wakeup, "SPIN_S", spin_s)
    monkeypatch.setattr(wakeup.time, "monotonic", (tick * LOOK_S for tick in itertools.count()).__next__)
    monkeypatch.setattr(wake_up, "_poll", poll)
    wake_up.add(Source())
    if awake_s:
        wake_up.stay_awake(awake_s)
    assert not wake_up.wait(0.5)
    assert poll.asked[-1] == 500.0
    assert set(poll.asked[:-1]) <= {0}
    assert looks - 2 <= len(poll.asked) - 1 <= looks
    asked = len(poll.asked)
    assert not wake_up.wait(0.5)
    assert len(poll.asked) - asked <= 4, "the time to stay awake has passed"
    wake_up.close()
