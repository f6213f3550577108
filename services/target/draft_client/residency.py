"""When rounds stay on the device with a draft elsewhere, and how they begin; what is late or refused goes the host's way for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.connection import Connection
from outrider.services.target.draft_client.remote_batch import (
    ENTER_LIMIT_S,
    ExchangeNumbers,
    RemoteBatch,
    TreesBuffer,
    size_message,
)
from outrider.services.target.draft_client.session import DraftSession
from outrider.shared.spec.resident import RoundState
from outrider.shared.spec.tree import DraftShape

FIRST_PAUSE_S = 0.1
SHORT_PAUSE_S = 1.0
LAST_PAUSE_S = 5.0
GOOD_ROUNDS = 64
"""So many in a row make a draft that was late as good as any."""

_log = logging.getLogger("outrider.target.draft")


class Residency:
    """Engine thread only.

    Args:
        device: Of the target.
        vocab_size: Of the target.
        patience_s: How long the draft may take for anything.
        late: Told when a draft that was waited for as long as it takes gave no trees.
    """

    def __init__(
        self, device: torch.device, vocab_size: int, patience_s: float, late: Callable[[], None]
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._patience_s = patience_s
        self._late = late
        self._numbers = ExchangeNumbers()
        self._buffers: dict[tuple[int, int], TreesBuffer] = {}
        self._sizes: list[draft_pb2.RoundsEnter] = []
        self._rounds: RemoteBatch | None = None
        # Sizes that the draft has begun rounds of, over this connection and since the last pause: rows, columns, shape, and about how long
        # the longest sequence is, as longer ones may cost the draft a recording.
        self._welcome: set[tuple[int, int, DraftShape, int]] = set()
        self._answer: draft_pb2.RoundsEntered | None = None
        self._awaited = False
        self._unanswered: int | None = None
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0

    def is_open(self, connection: Connection) -> bool:
        """Whether rounds may begin, or go on, over a connection."""
        if connection.carrier.rounds is None:
            return False
        if self._rounds is not None:
            return True
        if self._numbers.spent:
            self._restart_numbers(connection)
        return not connection.ended.is_set() and time.monotonic() >= self._not_before

    def for_capture(self, connection: Connection | None, shape: DraftShape, state: RoundState) -> RemoteBatch:
        """Return rounds without sessions and without a draft, which is told of their size: it records its part too."""
        size = size_message(shape, state)
        if size not in self._sizes:
            self._sizes.append(size)
            if connection is not None:
                self._tell(connection, [size])
        return self._make(None, (), shape, state)

    def connected(self, connection: Connection) -> None:
        """Tell a draft of the sizes that are recorded here."""
        self._welcome.clear()
        self._tell(connection, self._sizes)

    def enter(
        self,
        connection: Connection,
        sessions: Sequence[DraftSession],
        shape: DraftShape,
        state: RoundState,
        take_reply: Callable[[Connection, float], bool],
    ) -> RemoteBatch | None:
        """Begin rounds; None if the draft cannot, which is not asked again for a while.

        Where it could before, and has nothing to wait for, its answer is not waited for: if it says no, their first round has no trees.

        Args:
            connection: Usable.
            sessions: Live, with 1 to R pending tokens and their features.
            shape: Of every tree.
            state: With idle rows; filled, whether the draft agrees or not.
            take_reply: Waits so many seconds for a message, takes it in, and says whether the connection goes on.
        """
        channel = connection.carrier.rounds
        assert channel is not None, "asked of a gate that is closed"
        assert state.packed is not None, "the engine's states are packed"
        buffer = self._buffer(state.bs, shape.max_nodes)
        if not channel.mend() or not channel.fits(state.packed, buffer.trees.blob):
            self._pause("the batch is too large, or the last rounds are not over")
            return None
        rounds = self._rounds = self._make(connection, sessions, shape, state)
        self._answer = None
        connection.send(draft_pb2.SessionRequest(rounds_enter=rounds.entering(state)))
        rounds.fill(state)  # while the draft makes ready
        longest = max((session.fence.committed_len for session in sessions), default=0)
        size = (state.bs, state.columns, shape, longest.bit_length())
        self._awaited = size not in self._welcome or connection.carrier.rows_behind
        if not self._awaited:
            return rounds
        answer = self._await_answer(connection, take_reply)
        if answer is not None and answer.accepted:
            self._welcome.add(size)
            return rounds
        rounds.leave()
        if answer is None:
            self._pause("no answer yet")
        else:
            self._pause(answer.reason)
        return None

    def hear(self, reply: draft_pb2.SessionReply) -> None:
        """Take in whether rounds have begun, or that the draft wants them to end."""
        rounds, entered, ended = self._rounds, reply.rounds_entered, reply.rounds_ended
        if rounds is not None and reply.HasField("rounds_entered") and entered.rounds == rounds.id:
            self._answer = entered
            rounds.answered = True
            if not entered.accepted:
                rounds.ended = True
                if not self._awaited:
                    self._pause(entered.reason)
        elif reply.HasField("rounds_entered") and entered.rounds == self._unanswered:
            self._unanswered = None
            if entered.accepted and self._pause_s <= SHORT_PAUSE_S:
                self._not_before = 0.0  # it had to record this size, or had long prompts to take in, and will be in time from now on
        elif rounds is not None and reply.HasField("rounds_ended") and ended.rounds == rounds.id:
            if not rounds.ended:
                self._pause(ended.reason)
            rounds.ended = True

    @staticmethod
    def _tell(connection: Connection, sizes: Sequence[draft_pb2.RoundsEnter]) -> None:
        if connection.carrier.rounds is not None:
            for size in sizes:
                connection.send(draft_pb2.SessionRequest(rounds_prepare=size))

    def _restart_numbers(self, connection: Connection) -> None:
        """End the connection, whose words and slots know greater numbers; the link makes another. What trees have come is forgotten."""
        _log.info("numbers of rounds begin again, over a new connection")
        connection.close()
        self._numbers.restart()
        self._unanswered = None
        for buffer in self._buffers.values():
            buffer.trees.number.zero_()

    def _await_answer(
        self, connection: Connection, take_reply: Callable[[Connection, float], bool]
    ) -> draft_pb2.RoundsEntered | None:
        until = time.monotonic() + min(ENTER_LIMIT_S, self._patience_s)
        while self._answer is None and (remaining := until - time.monotonic()) > 0:
            if not take_reply(connection, remaining):
                break
        return self._answer

    def _make(
        self,
        connection: Connection | None,
        sessions: Sequence[DraftSession],
        shape: DraftShape,
        state: RoundState,
    ) -> RemoteBatch:
        return RemoteBatch(
            None if connection is None else connection.carrier.rounds,
            sessions,
            shape,
            self._buffer(state.bs, shape.max_nodes),
            vocab_size=self._vocab_size,
            patience_s=self._patience_s,
            numbers=self._numbers,
            left=lambda message: self._leave(connection, message),
        )

    def _leave(self, connection: Connection | None, message: draft_pb2.RoundsLeave) -> None:
        rounds, self._rounds = self._rounds, None
        if connection is None or rounds is None:
            return
        connection.send(draft_pb2.SessionRequest(rounds_leave=message))
        if not rounds.answered:
            self._unanswered = rounds.id
        channel = connection.carrier.rounds
        if channel is not None and channel.broken and not connection.ended.is_set():
            self._pause("trees came late")
            if rounds.patient:
                self._late()
        elif rounds.num_exchanged >= GOOD_ROUNDS:
            self._pause_s = FIRST_PAUSE_S

    def _pause(self, reason: str) -> None:
        self._welcome.clear()
        _log.info("rounds by way of the host for %.1f s: %s", self._pause_s, reason)
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def _buffer(self, bs: int, nodes: int) -> TreesBuffer:
        if (bs, nodes) not in self._buffers:
            self._buffers[bs, nodes] = TreesBuffer.make(bs, nodes, self._device)
        return self._buffers[bs, nodes]
