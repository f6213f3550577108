"""The target's side of rounds over gRPC, with a fake stream, relay and clock, to check send times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport.stream_exchange import StreamExchange
from outrider.shared.rpc.polling import PollWindow
from outrider.shared.spec.resident import RoundState, StateBlob, StateLayout
from support.connection.relay_rig import SIZE, Relay

COLUMNS, WIDTH = 2, 32
STATE_SIZE = 256 + 256 + COLUMNS * WIDTH * 4


class Stream:
    """A stream whose peer is the test.

    Each function in `answers` is called with the message sent last, and returns a reply or None.
    """

    def __init__(self) -> None:
        self.sent: list[draft_pb2.SessionRequest] = []
        self.answers: deque[Callable[[draft_pb2.SessionRequest], draft_pb2.SessionReply | None]] = deque()
        self.ended = False
        self.cancelled = False

    def send(self, message: bytes) -> None:
        self.sent.append(draft_pb2.SessionRequest.FromString(message))

    def receive_within(self, seconds: float) -> bytes | None:
        answer = self.answers.popleft()(self.sent[-1]) if self.answers else None
        if answer is None:
            self.ended = True
            return None
        return answer.SerializeToString()

    def poll(self) -> list[bytes]:
        return []

    def cancel(self) -> None:
        self.cancelled = True


class Target:
    """The target's side of the rounds, with a fake stream and a fake GPU relay."""

    def __init__(self) -> None:
        self.stream, self.relay = Stream(), Relay()
        self.poll_window = PollWindow(enabled=False)
        self.channel = StreamExchange(self.stream, self.poll_window, self.dispatch, self.relay)  # type: ignore[arg-type]
        self.state = RoundState.idle(1, COLUMNS, WIDTH, torch.float32, "cpu")
        assert self.state.packed is not None
        self.packed = self.state.packed
        assert self.packed.nbytes == STATE_SIZE
        self.sent_state = StateBlob(self.packed, StateLayout([self.state.layout]))
        self.state.features.copy_(torch.arange(COLUMNS * WIDTH).view(1, COLUMNS, WIDTH))
        self.state.counts.fill_(COLUMNS)
        self.trees = torch.zeros(SIZE, dtype=torch.uint8)
        self.expected = torch.zeros(1, dtype=torch.int32)

    def dispatch(self, message: bytes) -> None:
        self.channel.arrived(draft_pb2.SessionReply.FromString(message).round_trees)

    def exchange(self, number: int, ahead: bool = True, limit_s: float = 1.0) -> None:
        message = draft_pb2.RoundsNext(rounds=1, number=number)
        self.channel.exchange(message, self.sent_state, self.trees, self.expected, limit_s, ahead)

    def finish(self) -> None:
        self.channel.send_state()
        self.channel.receive_trees(True)

    def answer(self, data: bytes, number: int | None = None) -> None:
        def of(request: draft_pb2.SessionRequest) -> draft_pb2.SessionReply:
            known = request.round_state.number if number is None else number
            return draft_pb2.SessionReply(
                round_trees=draft_pb2.RoundTrees(rounds=1, number=known, trees=data)
            )

        self.stream.answers.append(of)


class Clock:
    """Fake time for `stream_exchange`. The time advances while a thread busy-polls."""

    STEP_S = 1e-5

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def give_way(self) -> None:
        self.now += self.STEP_S


class TimedPasses:
    """Rounds whose passes take given times. Records the times of the early notice and of the GPU switch.

    Attributes:
        verify_s: Duration of the target's part of the next round.
        draft_s: Duration of the draft's part.
        tell_s: Time that sending the early notice takes.
        enqueued_at: Time at which the last round's pass could start.
        soon_at: Time at which the early notice was sent. None if it was not sent.
        called_at: Time at which the GPU was switched back. None if it was not switched back.
    """

    def __init__(self, target: Target, clock: Clock) -> None:
        self.verify_s, self.draft_s, self.tell_s = 0.003, 0.002, 0.0
        self.enqueued_at, self.state_at = 0.0, 0.0
        self.soon_at: float | None = None
        self.called_at: float | None = None
        self._target, self._clock = target, clock
        target.poll_window.enabled = True
        self._send, self._settle = target.stream.send, target.relay.settle
        target.stream.send = self._note_send  # type: ignore[method-assign]
        target.relay.given = self._given  # type: ignore[method-assign]
        target.relay.settle = self._wait  # type: ignore[method-assign]
        target.relay.call = self._note_call  # type: ignore[method-assign]

    def run(self, number: int, limit_s: float = 1.0) -> None:
        self.enqueued_at, self.soon_at, self.called_at = self._clock.now, None, None
        self._target.exchange(number, limit_s=limit_s)

        def answer(request: draft_pb2.SessionRequest) -> draft_pb2.SessionReply:
            self._clock.now = max(self._clock.now, self.state_at + self.draft_s)
            return draft_pb2.SessionReply(
                round_trees=draft_pb2.RoundTrees(rounds=1, number=number, trees=bytes(SIZE))
            )

        self._target.stream.answers.append(answer)
        self._target.finish()

    def _note_send(self, message: bytes) -> None:
        self._send(message)
        match self._target.stream.sent[-1].WhichOneof("message"):
            case "round_soon":
                self.soon_at = self._clock.now
                self._clock.now += self.tell_s
            case "round_state":
                self.state_at = self._clock.now

    def _note_call(self) -> None:
        self.called_at = self._clock.now

    def _given(self, number: int) -> bool:
        return self._clock.now >= self.enqueued_at + self.verify_s

    def _wait(self, number: int, num_bytes: int) -> NDArray[np.uint8]:
        self._clock.now = max(self._clock.now, self.enqueued_at + self.verify_s)
        return self._settle(number, num_bytes)
