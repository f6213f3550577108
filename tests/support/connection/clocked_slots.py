"""Slots at a remote draft whose connection, channel and clock belong to the test."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client import remote_slots
from outrider.services.target.draft_client.breaker import Breaker
from outrider.services.target.draft_client.deadlines import AnswerDeadlines
from outrider.services.target.draft_client.remote_slots import RemoteSlots
from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.drafter import FeatureSpec
from outrider.shared.spec.exchanged_slots import ExchangedGroup, TreeExchange
from outrider.shared.spec.fence import Fence
from outrider.shared.spec.resident import GroupSize, StateBlob
from outrider.shared.spec.tree import DraftShape

CPU = torch.device("cpu")
SHAPE, CHAIN = DraftShape(3, 2, 8), DraftShape(2, 1, 3)
VOCAB, WIDTH, COLUMNS = 64, 4, 6
SIZE = GroupSize(2, COLUMNS, SHAPE.max_nodes)
FAULT_S = 2.0


class SlotsChannel:
    """Carries nothing, and records the messages and limits."""

    def __init__(self) -> None:
        self.broken = False
        self.room = True
        self.mends = True
        self.messages: list[draft_pb2.RoundsNext] = []
        self.limits: list[float] = []

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return self.room

    def mend(self) -> bool:
        self.broken = self.broken and not self.mends
        return self.mends

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: StateBlob,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        self.messages.append(message)
        self.limits.append(limit_s)
        expected.fill_(message.number)

    def send_state(self) -> None:
        pass

    def receive_trees(self, wanted: bool) -> None:
        pass


class DraftSlots:
    """Slots at a draft whose connection and clock belong to the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, channel: SlotsChannel | None = None) -> None:
        self.now = 100.0
        self.faults: list[float] = []
        monkeypatch.setattr(remote_slots.time, "monotonic", lambda: self.now)
        self.channel = channel or SlotsChannel()
        self.sent: list[draft_pb2.SessionRequest] = []
        self.sessions: dict[int, DraftSession] = {}
        self.breaker = Breaker(FAULT_S)
        self.connection = self.connect()
        self.deadlines = AnswerDeadlines(FAULT_S)
        self.slots = RemoteSlots(
            CPU,
            VOCAB,
            torch.float32,
            self.sessions,
            self.deadlines,
            self.breaker,
            lambda _connection, _timeout_s: True,
            self.faults.append,
        )
        self.slots.connected(self.connection)
        self.accept()

    def connect(self) -> Any:
        ended = threading.Event()
        return SimpleNamespace(
            carrier=SimpleNamespace(exchange=self.channel),
            send=self.sent.append,
            ended=ended,
            close=ended.set,
            spec=FeatureSpec(feature_size=WIDTH),
            hello=draft_pb2.HelloAck(max_steps=5),
            last_sign_s=0.0,
        )

    def accept(self, reason: str = "") -> None:
        opened = draft_pb2.SlotsOpened(accepted=not reason, reason=reason)
        self.slots.hear(draft_pb2.SessionReply(slots_opened=opened))

    def open(self, session_id: int, *, ready: bool = True, epoch: int = 1) -> DraftSession:
        made = self.sessions[session_id] = DraftSession(Fence(session_id, epoch, 6, 1234))
        made.live = made.acked = True
        if ready:
            self.report(session_id, epoch)
        return made

    def report(self, session_id: int, epoch: int = 1) -> None:
        ready = draft_pb2.SlotReady(session_id=session_id, epoch=epoch)
        self.slots.hear(draft_pb2.SessionReply(slot_ready=ready))

    def round(self, *session_ids: int, limit_s: float | None = None) -> TreeExchange | None:
        assert self.slots.fits([SIZE])
        group = ExchangedGroup(SHAPE, 2, COLUMNS, session_ids, [9] * len(session_ids))
        started = self.slots.begin([group])
        if started is not None:
            started.exchange(limit_s, False)
        return started

    @property
    def last(self) -> draft_pb2.RoundsNext:
        return self.channel.messages[-1]

    @property
    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("message") for message in self.sent]

    @property
    def is_open(self) -> bool:
        return self.slots.are_open()
