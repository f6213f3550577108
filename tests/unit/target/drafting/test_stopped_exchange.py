"""Laws: a draft that stops again and again rarely holds up the neighbours of rows in mode `on`.

The rounds stay on the device. The clock advances only while the target waits for trees, and by the time of
rounds, so waits can be added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.connection.clocked_slots import FAULT_S, DraftSlots, SlotsChannel

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.answer_times import ANSWERS_TO_JUDGE
from outrider.services.target.draft_client.breaker import CAPACITY_S, SHARE, BreakerState
from outrider.services.target.drafting import exchange_source
from outrider.services.target.drafting.draft_source import PreparedDrafts
from outrider.services.target.drafting.exchange_source import ExchangeSource
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.policy.cost_model import DraftPath
from outrider.shared.spec.resident import StateBlob
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

ANSWER_S, ROUND_S = 0.004, 0.005
CAP_S = 0.05
"""Longest wait of a neighbour, in seconds: more than twice the 99th percentile of the usual answer times."""
SECONDS = 30.0
SHAPE = DraftShape(3, 1, 4)
PULSES = [(0.04, 0.06), (0.2, 0.3), (0.3, 0.4), (0.9, 1.0), (2.5, 3.0)]
"""Seconds for which the draft is stopped, and seconds of a period."""
MIXTURES = [("on", "off"), ("on", "auto", "off"), ("auto",)]


class PulsingChannel(SlotsChannel):
    """A draft that answers after `ANSWER_S`, but is stopped at the start of every period."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped_s, self.period_s = 0.0, 1.0
        self.target: Target | None = None

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: StateBlob,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        super().exchange(message, state, trees, expected, limit_s, ahead)
        assert self.target is not None
        answer_s = ANSWER_S + self.target.stopped_for(ANSWER_S)
        self.broken = answer_s > limit_s
        self.target.slots.now += min(answer_s, limit_s)


class RoundsThroughHost:
    """Rounds through the host that wait for nothing."""

    awaits_trees = False

    def prepare(self, entries: Sequence[Entry]) -> PreparedDrafts:
        return PreparedDrafts(entries, None, may_run_ahead=False)

    def ignore(self, *_: object, **_named: object) -> None:
        """Do nothing."""

    postponed = waits_for_host = commit = learn = ignore


class Target:
    """Runs rounds of an `ExchangeSource` on a clock of the test. Rounds through the host wait for nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...]) -> None:
        monkeypatch.setattr(exchange_source, "gather_rows", lambda *_: None)
        monkeypatch.setattr(exchange_source, "pack_drafts", lambda *_: None)
        self.channel = PulsingChannel()
        self.channel.target = self
        self.slots = DraftSlots(monkeypatch, self.channel)
        self.host: Any = RoundsThroughHost()
        runner: Any = SimpleNamespace(
            table=SimpleNamespace(slots=8), size_of=len, replays=lambda _entries: False
        )
        pool: Any = SimpleNamespace(device=torch.device("cpu"))
        self.source = ExchangeSource(self.slots.slots, self.host, runner, pool, mock.Mock())
        self.modes = dict(enumerate(modes, start=1))
        self.began = self.slots.now
        # Waits of more than the usual answer time, and the times at which exchanged rounds began.
        self.pauses: list[float] = []
        self.exchanged: list[float] = []

    def stopped_for(self, running_s: float) -> float:
        """Return the seconds for which the draft stops before it has run for a time."""
        into = (self.slots.now - self.began) % self.channel.period_s
        if into < self.channel.stopped_s:
            return self.channel.stopped_s - into
        return self.channel.stopped_s if into + running_s > self.channel.period_s else 0.0

    def stop(self, stopped_s: float, period_s: float) -> None:
        self.channel.stopped_s, self.channel.period_s = stopped_s, period_s
        self.began = self.slots.now

    def run(self, seconds: float) -> None:
        until = self.slots.now + seconds
        self.pauses.clear()
        self.exchanged.clear()
        while self.slots.now < until:
            self.round()

    def round(self) -> None:
        breaker, slots = self.slots.breaker, self.slots
        if not self.stopped_for(ANSWER_S):
            breaker.sign_of_life(slots.now)
            if breaker.state is BreakerState.HALF_OPEN:
                breaker.success(slots.now)  # a tree through the host
            for session_id in self.modes:
                session = slots.sessions.get(session_id)
                if session is None or session.lost:
                    slots.open(session_id, epoch=1 if session is None else session.fence.epoch + 1)
        entries = [self.entry(session_id, mode) for session_id, mode in self.modes.items()]
        before = slots.now
        self.source.waits_for_host(entries)
        prepared = self.source.prepare(entries)
        if prepared.enqueue is not None:
            self.exchanged.append(before)
            prepared.enqueue()
        self.source.launched()
        self.source.receive_trees()
        waited_s = slots.now - before
        if waited_s > ANSWER_S + 1e-9:
            self.pauses.append(waited_s)
        slots.now += ROUND_S
        self.source.read(set(), waited_s)

    def entry(self, session_id: int, mode: str) -> Entry:
        sequence: Any = SimpleNamespace(
            session_id=session_id,
            controller_state=None if mode == "on" else object(),
            form=None,
            epoch=1,
            committed_upper=9,
            fresh_columns=1,
            status=None,
        )
        may_draft = mode == "on" or (mode == "auto" and self.slots.breaker.state is BreakerState.CLOSED)
        return Entry(sequence, 0, SHAPE if may_draft else NO_DRAFT)


def warm(monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...]) -> Target:
    """Return a target that has measured the answers of a draft that runs."""
    target = Target(monkeypatch, modes)
    target.run(1.0)
    assert not target.pauses
    assert len(target.exchanged) > 2 * ANSWERS_TO_JUDGE
    return target


@pytest.mark.parametrize(("stopped_s", "period_s"), PULSES)
@pytest.mark.parametrize("modes", MIXTURES, ids="+".join)
def test_neighbours_of_a_draft_that_stops_now_and_then_wait_rarely_and_at_most_for_the_cap(
    monkeypatch: pytest.MonkeyPatch, stopped_s: float, period_s: float, modes: tuple[str, ...]
) -> None:
    target = warm(monkeypatch, modes)
    cap_s = target.slots.slots.others_s
    assert cap_s == CAP_S
    target.stop(stopped_s, period_s)
    target.run(SECONDS)
    assert target.pauses, "the draft is tried again and again"
    assert max(target.pauses) <= CAP_S + 1e-9
    in_vain_s = sum(target.pauses) - len(target.pauses) * ANSWER_S
    assert in_vain_s <= SECONDS * SHARE + CAPACITY_S + CAP_S
    assert sum(target.pauses) / SECONDS < 0.05, "the neighbours keep 95 % of their speed"
    assert target.slots.slots.others_s == pytest.approx(cap_s), "stalls make no wait longer"
    # The draft is taken up again once it runs.
    target.stop(0.0, 1.0)
    target.run(15.0)
    assert not target.pauses
    assert len([at for at in target.exchanged if at > target.slots.now - 5.0]) > 500


@pytest.mark.parametrize("modes", MIXTURES, ids="+".join)
def test_a_draft_that_stops_for_good_delays_neighbours_once(
    monkeypatch: pytest.MonkeyPatch, modes: tuple[str, ...]
) -> None:
    target = warm(monkeypatch, modes)
    target.stop(1e9, 2e9)
    target.run(SECONDS)
    assert target.pauses == [pytest.approx(CAP_S)]
    assert len(target.exchanged) == 1
    assert not target.slots.faults


def test_the_first_rounds_wait_for_a_share_of_the_fault_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(monkeypatch, ("on", "off"))
    target.stop(1e9, 2e9)
    for session_id in target.modes:
        target.slots.open(session_id)
    target.round()
    assert target.pauses == [pytest.approx(FAULT_S / 8)]
    assert target.source.path is DraftPath.HOST


def test_rows_of_mode_on_wait_alone_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = warm(monkeypatch, ("on", "on"))
    target.stop(0.2, 0.4)
    target.run(SECONDS)
    assert max(target.pauses) == pytest.approx(0.2 + ANSWER_S, abs=ANSWER_S)
    assert not target.slots.faults
    assert not target.slots.breaker.budget.empty_s(target.slots.now), "nobody else has waited"
