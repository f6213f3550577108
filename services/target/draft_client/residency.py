"""Starts rounds on the device with a remote draft; falls back to the host after late or refused rounds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.answer_times import AnswerTimes
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
"""First pause in seconds after late or refused rounds. Each further pause is twice as long."""
SHORT_PAUSE_S = 1.0
"""A late acceptance ends the current pause early if the next pause would be at most this long, in seconds."""
LAST_PAUSE_S = 5.0
"""Longest pause in seconds."""
GOOD_ROUNDS = 64
"""Number of rounds in time, in a row, after which the next pause is the first pause again."""

_log = logging.getLogger("outrider.target.draft")


class Residency:
    """Decides when rounds may run on the device with a remote draft, and starts them. Engine thread only.

    Args:
        device: The target's device.
        vocab_size: The target's vocabulary size.
        times: Measured times of answers, to which this class adds those of rounds. They limit the waits.
        on_late: Called when the trees of a round were late, with the seconds of the wait, and True if only
            rows without a deadline have waited.
    """

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        times: AnswerTimes,
        on_late: Callable[[float, bool], None],
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._times = times
        self._on_late = on_late
        self._numbers = ExchangeNumbers()
        self._buffers: dict[tuple[int, int], TreesBuffer] = {}
        self._sizes: list[draft_pb2.RoundsEnter] = []
        self._rounds: RemoteBatch | None = None
        # Sizes for which the draft has started rounds over this connection since the last pause. A size
        # consists of rows, columns, shape and the bit length of the longest sequence, because a longer
        # sequence may force the draft to record a graph.
        self._welcome: set[tuple[int, int, DraftShape, int]] = set()
        self._answer: draft_pb2.RoundsEntered | None = None
        self._awaited = False  # whether `enter` waits for the draft's answer
        self._unanswered: int | None = None
        self._pause_s = FIRST_PAUSE_S
        self._not_before = 0.0

    def is_open(self, connection: Connection) -> bool:
        """Return True if rounds may start or continue over this connection."""
        if connection.carrier.rounds is None:
            return False
        if self._rounds is not None:
            return True
        if self._numbers.spent:
            self._restart_numbers(connection)
        return not connection.ended.is_set() and time.monotonic() >= self._not_before

    def for_capture(self, connection: Connection | None, shape: DraftShape, state: RoundState) -> RemoteBatch:
        """Return a batch for recording, without sessions and without a connection.

        The draft receives the size of the batch, so that the draft also records its part.
        """
        size = size_message(shape, state)
        if size not in self._sizes:
            self._sizes.append(size)
            if connection is not None:
                self._tell(connection, [size])
        return self._make(None, (), shape, state)

    def connected(self, connection: Connection) -> None:
        """Send a new draft the sizes of all rounds that this target has recorded."""
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
        """Start rounds. If the draft cannot take part, return None and pause before the next attempt.

        If the draft has accepted this size before and has no prompt rows to receive, do not wait for the
        draft's answer. If the draft then refuses, the first round has no trees.

        Args:
            connection: A usable connection.
            sessions: Live sessions with 1 to R pending tokens each, and the features of these tokens.
            shape: The shape of every tree.
            state: A state of idle rows. The call fills this state even if the draft refuses.
            take_reply: Waits up to the given number of seconds for a message and processes the message.
                Returns False if the connection has ended.
        """
        # 1. Check that the state and the trees fit into the channel.
        channel = connection.carrier.rounds
        assert channel is not None, "is_open() comes first"
        assert state.packed is not None, "the engine's states are packed"
        buffer = self._buffer(state.bs, shape.max_nodes)
        if not channel.mend() or not channel.fits(state.packed, buffer.trees.blob):
            self._pause("the batch is too large, or the last rounds are not over")
            return None
        # 2. Send RoundsEnter, and fill the state while the draft prepares.
        rounds = self._rounds = self._make(connection, sessions, shape, state)
        self._answer = None
        connection.send(draft_pb2.SessionRequest(rounds_enter=rounds.entering(state)))
        rounds.fill(state)
        # 3. Wait for the answer, unless the draft will most likely accept.
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
        """Process the draft's answer to RoundsEnter, or the draft's request to end the rounds."""
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
                # The draft was late because it had to record this size or process long prompts. Later rounds
                # of this size will be in time, so end the pause.
                self._not_before = 0.0
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
        """Close the connection, so that the link opens a new one and round numbers can restart.

        The old connection's streams and slots contain greater numbers. Trees that have arrived are discarded.
        """
        _log.info("round numbers restart over a new connection")
        connection.close()
        self._numbers.restart()
        self._unanswered = None
        for buffer in self._buffers.values():
            buffer.trees.number.zero_()

    def _await_answer(
        self, connection: Connection, take_reply: Callable[[Connection, float], bool]
    ) -> draft_pb2.RoundsEntered | None:
        until = time.monotonic() + min(ENTER_LIMIT_S, self._times.limit_s)
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
            times=self._times,
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
            self._pause("trees arrived late")
            self._on_late(rounds.limit_s, rounds.patient)
        elif rounds.num_exchanged >= GOOD_ROUNDS:
            self._pause_s = FIRST_PAUSE_S

    def _pause(self, reason: str) -> None:
        self._welcome.clear()
        _log.info("running rounds through the host for %.1f s: %s", self._pause_s, reason)
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LAST_PAUSE_S)

    def _buffer(self, bs: int, nodes: int) -> TreesBuffer:
        if (bs, nodes) not in self._buffers:
            self._buffers[bs, nodes] = TreesBuffer.make(bs, nodes, self._device)
        return self._buffers[bs, nodes]
