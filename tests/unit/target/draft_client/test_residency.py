"""Starts and pauses of device rounds with a remote draft: refusals, late answers and ended rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client import answer_times, remote_batch, residency
from outrider.services.target.draft_client.remote_batch import MAX_ROUND_NUMBER, RemoteBatch
from outrider.services.target.draft_client.residency import Residency
from outrider.services.target.draft_client.session import DraftSession
from outrider.services.target.settings import TargetSettings
from outrider.shared.spec.fence import Fence, extend_prefix_hash
from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.tree import DraftShape

CPU = torch.device("cpu")
SHAPE = DraftShape(3, 2, 8)
VOCAB, WIDTH, COLUMNS = 64, 4, 6


class Channel:
    """Carries nothing; records the messages and limits."""

    def __init__(self) -> None:
        self.broken = False
        self.room = True
        self.told: list[draft_pb2.RoundsNext] = []
        self.limits: list[float] = []

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return self.room

    def mend(self) -> bool:
        self.broken = False
        return True

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: torch.Tensor,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        self.told.append(message)
        self.limits.append(limit_s)
        expected.fill_(message.number)

    def hand_over(self) -> None: ...

    def carry(self, wanted: bool) -> None: ...


class Draft:
    """A connection whose peer is the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.late: list[tuple[float, bool]] = []
        monkeypatch.setattr(residency.time, "monotonic", lambda: self.now)
        self.channel = Channel()
        self.sent: list[draft_pb2.SessionRequest] = []
        self.connection = self.connect()
        self.gate = Residency(CPU, VOCAB, answer_times.AnswerTimes(2.0), self._late)
        self.state = RoundState.idle(2, COLUMNS, WIDTH, torch.float32, CPU)

    def connect(self) -> Any:
        ended = threading.Event()
        carrier = SimpleNamespace(rounds=self.channel, rows_behind=False)
        return SimpleNamespace(carrier=carrier, send=self.sent.append, ended=ended, close=ended.set)

    def _late(self, waited_s: float, patient: bool) -> None:
        self.late.append((waited_s, patient))

    def answer(self, accepted: bool, reason: str = "") -> None:
        """Answer the last RoundsEnter."""
        rounds = next(m.rounds_enter.rounds for m in reversed(self.sent) if m.HasField("rounds_enter"))
        entered = draft_pb2.RoundsEntered(rounds=rounds, accepted=accepted, reason=reason)
        self.gate.hear(draft_pb2.SessionReply(rounds_entered=entered))

    def enter(self, session: DraftSession, reply: Callable[[], object]) -> RemoteBatch | None:
        def take_reply(_connection: Any, timeout_s: float) -> bool:
            if reply() is None:
                self.now += timeout_s
            return True

        return self.gate.enter(self.connection, [session], SHAPE, self.state, take_reply)

    @property
    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.sent]

    @property
    def open(self) -> bool:
        return self.gate.is_open(self.connection)


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> Draft:
    return Draft(monkeypatch)


@pytest.fixture
def session() -> DraftSession:
    made = DraftSession(Fence(9, 1, 6, 1234))
    made.live = made.acked = True
    made.base_len, made.token_ids = 4, [3, 5]
    made.features = [torch.full((1, WIDTH), 1.0), torch.full((1, WIDTH), 2.0)]
    return made


def accept(draft: Draft) -> Callable[[], object]:
    return lambda: (draft.answer(True), True)


def test_what_is_pending_begins_the_rounds_and_stays_pending_until_one_was_read(
    draft: Draft, session: DraftSession
) -> None:
    rounds = draft.enter(session, accept(draft))
    assert rounds is not None
    (row,) = draft.sent[0].rounds_enter.rows
    assert (row.base_len, list(row.token_ids), row.fence.committed_len) == (4, [3, 5], 6)
    assert draft.state.counts.tolist() == [2, 0]
    assert draft.state.tokens[0].tolist() == [3, 5, 0, 0, 0, 0]
    assert draft.state.features[0, :2, 0].tolist() == [1.0, 2.0]
    rounds.leave()
    assert (session.base_len, session.token_ids, len(session.features)) == (4, [3, 5], 2)
    assert draft.kinds == ["rounds_enter", "rounds_leave"]


def answered_at_once(draft: Draft, session: DraftSession) -> RemoteBatch:
    """Return rounds of a size that the draft has accepted before, entered without a wait for its answer."""
    known = draft.enter(session, accept(draft))
    assert known is not None
    known.leave()
    rounds = draft.enter(session, lambda: pytest.fail("enter() must not wait for the answer"))
    assert rounds is not None
    return rounds


def test_the_answer_is_not_waited_for_where_the_draft_agreed_before(
    draft: Draft, session: DraftSession
) -> None:
    rounds = answered_at_once(draft, session)
    assert rounds.reserve([20])
    rounds.exchange(draft.state, 0.01, False)
    assert draft.channel.limits == [
        residency.ENTER_LIMIT_S
    ]  # the first round includes the draft's preparations
    draft.answer(True)
    assert rounds.reserve([20])
    rounds.exchange(draft.state, 0.01, False)
    assert draft.channel.limits[1:] == [0.01]
    rounds.committed([[7]])
    rounds.committed([[8]])
    rounds.leave()
    assert draft.open


@pytest.mark.parametrize("before_the_first_round", [True, False])
def test_a_refusal_that_was_not_waited_for_ends_the_rounds(
    draft: Draft, session: DraftSession, before_the_first_round: bool
) -> None:
    rounds = answered_at_once(draft, session)
    if not before_the_first_round:
        assert rounds.reserve([20])
        rounds.exchange(draft.state, None, False)
    draft.answer(False, "busy")
    assert not rounds.reserve([20])
    rounds.leave()
    assert not draft.open
    draft.now += 10.0
    assert draft.open
    assert (
        draft.enter(session, lambda: (draft.answer(False, "busy"), True)) is None
    )  # the draft is asked again


@pytest.mark.parametrize("what", ["rows", "pause", "connection", "length"])
def test_the_answer_is_waited_for_where_the_draft_may_not_be_ready(
    draft: Draft, session: DraftSession, what: str
) -> None:
    known = draft.enter(session, accept(draft))
    assert known is not None
    if what == "rows":
        draft.connection.carrier.rows_behind = True
    elif what == "pause":
        draft.gate.hear(
            draft_pb2.SessionReply(rounds_ended=draft_pb2.RoundsEnded(rounds=known.id, reason="busy"))
        )
        draft.now += 10.0
    elif what == "connection":
        draft.gate.connected(draft.connection)
    known.leave()
    if what == "length":
        session.fence = Fence(9, 1, 60, 1234)
        session.base_len = 58
    asked: list[None] = []
    assert draft.enter(session, lambda: (asked.append(None), draft.answer(True), True)) is not None
    assert asked


def test_the_last_round_stays_pending_and_what_came_before_is_told(
    draft: Draft, session: DraftSession
) -> None:
    rounds = draft.enter(session, accept(draft))
    assert rounds is not None
    for chosen in ([7], [8, 9], [10]):
        assert rounds.reserve([20])
        rounds.exchange(draft.state, None, False)
        rounds.committed([chosen])
    draft.state.features[0] = 5.0
    rounds.leave()
    assert [list(outcome.token_ids) for message in draft.channel.told for outcome in message.chosen] == [
        [7],
        [8, 9],
    ]
    assert not draft.sent[-1].rounds_leave.chosen
    assert (session.base_len, session.token_ids) == (9, [10])
    assert session.features[0].tolist() == [[5.0] * WIDTH]
    assert session.fence == Fence(9, 1, 10, extend_prefix_hash(1234, [7, 8, 9, 10]))
    numbers = [message.number for message in draft.channel.told]
    assert numbers == list(range(numbers[0], numbers[0] + 3))


def test_a_refusal_closes_the_gate_for_longer_each_time(draft: Draft, session: DraftSession) -> None:
    pauses = []
    for _ in range(4):
        assert draft.open
        assert draft.enter(session, lambda: (draft.answer(False, "busy"), True)) is None
        began = draft.now
        while not draft.open:
            draft.now += 0.05
        pauses.append(draft.now - began)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]


def test_an_answer_that_comes_late_opens_the_gate_again(draft: Draft, session: DraftSession) -> None:
    began = draft.now
    assert draft.enter(session, lambda: None) is None
    assert 0 < draft.now - began <= 0.5
    assert not draft.open
    assert draft.kinds == ["rounds_enter", "rounds_leave"], (
        "rounds must be left even if the draft accepts later"
    )
    draft.answer(True)
    assert draft.open
    assert draft.enter(session, accept(draft)) is not None


def test_a_draft_that_wants_out_is_left_and_not_asked_for_a_while(
    draft: Draft, session: DraftSession
) -> None:
    rounds = draft.enter(session, accept(draft))
    assert rounds is not None
    assert rounds.reserve([20])
    draft.gate.hear(
        draft_pb2.SessionReply(rounds_ended=draft_pb2.RoundsEnded(rounds=rounds.id + 1, reason="busy"))
    )
    assert rounds.reserve([20]), "the message belongs to other rounds"
    draft.gate.hear(
        draft_pb2.SessionReply(rounds_ended=draft_pb2.RoundsEnded(rounds=rounds.id, reason="busy"))
    )
    assert not rounds.reserve([20])
    rounds.leave()
    assert not draft.open


@pytest.mark.parametrize(("limit_s", "late"), [(None, (2.0, True)), (0.3, (0.3, False))])
def test_trees_that_come_late_end_the_rounds(
    draft: Draft, session: DraftSession, limit_s: float | None, late: tuple[float, bool]
) -> None:
    rounds = draft.enter(session, accept(draft))
    assert rounds is not None
    rounds.exchange(draft.state, limit_s, False)
    draft.channel.broken = True
    assert not rounds.reserve([20])
    rounds.committed([[7]])
    rounds.leave()
    assert not draft.open
    assert draft.late == [late], "only a wait without a deadline makes the draft faulty"


def test_a_connection_that_ended_is_no_fault(draft: Draft, session: DraftSession) -> None:
    rounds = draft.enter(session, accept(draft))
    assert rounds is not None
    rounds.exchange(draft.state, None, False)
    draft.connection.ended.set()
    draft.channel.broken = True
    session.lose("draft_down")
    rounds.leave()
    assert (draft.late, session.lost, session.token_ids) == ([], True, [])


def test_measured_rounds_limit_the_waits(
    draft: Draft, session: DraftSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_batch.time, "monotonic", lambda: draft.now)
    rounds = draft.enter(session, accept(draft))
    assert rounds is not None
    for _round in range(answer_times.ANSWERS_TO_JUDGE + 1):
        rounds.exchange(draft.state, None, False)
        draft.now += 0.1
        rounds.committed([[7]])
    assert draft.channel.limits[0] == 2.0, "nothing was measured yet"
    rounds.exchange(draft.state, None, False)
    assert draft.channel.limits[-1] == pytest.approx(answer_times.WAIT_MULTIPLE * 0.1)
    assert rounds.others_s == pytest.approx(answer_times.OTHERS_MULTIPLE * 0.1)
    rounds.committed([[7]])
    rounds.leave()
    again = draft.enter(session, accept(draft))
    assert again is not None
    assert again.others_s == rounds.others_s, "a new batch knows what earlier ones have measured"


@pytest.mark.parametrize(
    ("values", "on_gpu", "on_cpu"),
    [
        ({"draft": "ipc:///d"}, True, False),
        ({"draft": "grpc://h:1"}, True, False),
        ({"draft": "grpc://h:1", "draft_rounds": "host"}, False, False),
        ({"draft": "ipc:///d", "tp": 2}, False, False),
        ({"draft": "ipc:///d", "draft_rounds": "host"}, False, False),
        ({"draft": "grpc://h:1", "draft_rounds": "device"}, True, True),
    ],
)
def test_rounds_stay_on_the_device_by_default_where_that_was_measured(
    values: dict[str, object], on_gpu: bool, on_cpu: bool
) -> None:
    settings = TargetSettings.load({"model": "/m", **values})
    assert settings.keeps_draft_rounds(torch.device("cuda")) == on_gpu
    assert settings.keeps_draft_rounds(CPU) == on_cpu


def test_a_batch_that_does_not_fit_is_not_asked_for(draft: Draft, session: DraftSession) -> None:
    draft.channel.room = False
    assert draft.enter(session, accept(draft)) is None
    assert draft.sent == []


def test_numbers_begin_again_with_a_new_connection_long_before_they_are_too_large(
    draft: Draft, session: DraftSession
) -> None:
    draft.gate._numbers._last = MAX_ROUND_NUMBER - 3
    rounds = draft.enter(session, accept(draft))
    assert rounds is not None
    for chosen in ([7], [8]):
        assert rounds.reserve([20])
        rounds.exchange(draft.state, None, False)
        rounds.committed([chosen])
    assert not rounds.reserve([20]), "the current rounds must end"
    rounds._buffer.trees.number.fill_(2)  # as left by a round long ago
    assert draft.open
    assert not draft.connection.ended.is_set(), "the connection must stay while rounds run"
    rounds.leave()
    assert not draft.open
    assert draft.connection.ended.is_set()
    assert not draft.open, "restarted numbers must not use the old connection"

    session.token_ids, session.base_len = [3, 5], 4
    draft.connection = draft.connect()
    assert draft.open
    again = draft.enter(session, accept(draft))
    assert again is not None
    assert again.reserve([20])
    again.exchange(draft.state, None, False)
    assert (again.id, draft.channel.told[-1].number) == (1, 2)
    assert rounds._buffer.trees.number.item() == 0, "an old tree must not match a new round"


def test_a_draft_is_told_once_of_each_size_and_again_over_a_new_connection(draft: Draft) -> None:
    wide = RoundState.idle(4, COLUMNS, WIDTH, torch.float32, CPU)
    draft.gate.for_capture(None, SHAPE, draft.state)
    assert draft.sent == []
    for state in (draft.state, wide, wide):
        draft.gate.for_capture(draft.connection, SHAPE, state)
    assert [message.rounds_prepare.batch for message in draft.sent] == [4]
    draft.gate.connected(draft.connect())
    assert [message.rounds_prepare.batch for message in draft.sent] == [4, 2, 4]
    size = draft.sent[0].rounds_prepare
    assert (size.rounds, size.columns, size.feature_size, size.shape.max_nodes) == (
        0,
        COLUMNS,
        WIDTH,
        SHAPE.max_nodes,
    )
