"""Rounds on the device with a remote draft: sends RoundsEnter, RoundsNext, RoundsLeave; checks the trees.

The draft receives:

- RoundsEnter when a batch starts;
- RoundsNext for each round as soon as the target has enqueued the round, so that the draft can enqueue its
  part. RoundsNext also carries the tokens of the rounds that were read since the last message;
- RoundsLeave when the batch ends.

When the batch ends, the tokens and features of the last round stay pending in the sessions, as they do after
a round through the host.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.kernels.tree_check import tree_check
from outrider.services.target.draft_client.answer_times import AnswerTimes
from outrider.services.target.draft_client.fences import fence_to_proto
from outrider.services.target.draft_client.session import DraftSession
from outrider.services.target.draft_client.transport.exchange import Exchange
from outrider.shared.rpc.tensors import wire_dtype
from outrider.shared.spec.fence import Fence, extend_prefix_hash
from outrider.shared.spec.resident import ExchangedBatch, RoundState, TreesBlob
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass(frozen=True, slots=True)
class TreesBuffer:
    """Device memory that receives the trees of rounds with one number of rows and one tree size.

    Attributes:
        trees: The received trees.
        expected: ``[1] int32``; the round number that the header of the trees must contain.
    """

    trees: TreesBlob
    expected: torch.Tensor

    @classmethod
    def make(cls, bs: int, nodes: int, device: torch.device) -> TreesBuffer:
        """Return a buffer of zeros."""
        with torch.inference_mode(False):
            return cls(TreesBlob.make(bs, nodes, device), torch.zeros(1, dtype=torch.int32, device=device))


def size_message(shape: DraftShape, state: RoundState) -> draft_pb2.RoundsEnter:
    """Return a RoundsEnter message without rows, which announces a size of rounds."""
    return draft_pb2.RoundsEnter(
        shape=draft_pb2.Shape(depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes),
        batch=state.bs,
        columns=state.columns,
        feature_size=state.features.shape[2],
        feature_dtype=wire_dtype(state.features.dtype),
    )


ENTER_LIMIT_S = 0.2
"""Longest wait for the answer to RoundsEnter. The draft answers once it has processed the prompts."""
MAX_ROUND_NUMBER = 1 << 30
"""Largest round number, reached after months of rounds.

It is half the range of int32, because a mailbox uses larger numbers to mark its end.
"""


class ExchangeNumbers:
    """Issues round numbers. A number is not reused before `restart`.

    The header of a message from an older connection therefore never matches. Numbers ascend during a
    connection, because streams wait for a given number or a greater one.
    """

    def __init__(self) -> None:
        self._last = 0

    @property
    def spent(self) -> bool:
        """True if numbers must `restart`. Rounds in flight may still take numbers."""
        return self._last >= MAX_ROUND_NUMBER

    def restart(self) -> None:
        """Start again at 1. The connection must not have used any number yet."""
        self._last = 0

    def take(self) -> int:
        """Return the next number."""
        self._last += 1
        return self._last


class RemoteBatch(ExchangedBatch):
    """One batch of rounds on the device whose drafts come from another process.

    Args:
        channel: Carries states and trees. None records rounds without a connection.
        sessions: The sessions in the order of the state's rows. Each has 1 to R pending tokens.
        shape: The shape of every tree.
        buffer: Receives the trees.
        vocab_size: The target's vocabulary size.
        times: Measured times of rounds, which limit the waits for trees.
        numbers: Issues round numbers.
        left: Called at the end of the batch with the RoundsLeave message for the draft.

    Attributes:
        id: The identifier of this batch in messages to the draft.
        answered: True once the draft has answered RoundsEnter. Until then, the wait for trees includes the
            time that the draft still needs to prepare.
        ended: True if the draft wants this batch to end or does not know this batch.
        num_exchanged: Number of rounds exchanged so far.
        patient: True if only rows without a deadline have waited for the last round's trees.
        limit_s: The limit of that wait, in seconds.
    """

    def __init__(
        self,
        channel: Exchange | None,
        sessions: Sequence[DraftSession],
        shape: DraftShape,
        buffer: TreesBuffer,
        *,
        vocab_size: int,
        times: AnswerTimes,
        numbers: ExchangeNumbers,
        left: Callable[[draft_pb2.RoundsLeave], None] = lambda _message: None,
    ) -> None:
        self.id = numbers.take()
        self.answered = False
        self.ended = False
        self.num_exchanged = 0
        self.patient = False
        self.limit_s = 0.0
        self.key: Hashable = ("remote", buffer.trees.blob.data_ptr())
        self._channel = channel
        self._sessions: list[DraftSession | None] = list(sessions)
        self._shape = shape
        self._buffer = buffer
        self._vocab_size = vocab_size
        self._times = times
        self._read_at: float | None = None
        self._numbers = numbers
        self._left = left
        self._upper: Sequence[int] = ()
        self._untold: list[list[list[int]]] = []
        self._num_committed = 0
        self._state: RoundState | None = None

    def entering(self, state: RoundState) -> draft_pb2.RoundsEnter:
        """Return the RoundsEnter message that starts the rounds."""
        message = size_message(self._shape, state)
        message.rounds = self.id
        for session in self._sessions:
            assert session is not None, "no row has ended before the first round"
            message.rows.add(
                fence=fence_to_proto(session.fence), base_len=session.base_len, token_ids=session.token_ids
            )
        return message

    def fill(self, state: RoundState) -> None:
        """Copy the pending tokens and features into the first rows of the state, in stream order.

        The tokens and features stay pending until a round has been read.
        """
        self._state = state
        pending = [session for session in self._sessions if session is not None]
        state.fill(
            [session.token_ids for session in pending],
            [session.features for session in pending] if state.features.shape[2] else (),
        )

    @property
    def others_s(self) -> float:
        return self._times.others_s

    def reserve(self, committed_upper: Sequence[int]) -> bool:
        """Note the bounds for the next RoundsNext.

        Return False if the draft has ended the batch, was late or has lost a session, or if the round numbers
        are used up.
        """
        self._upper = committed_upper
        if self.ended or self._numbers.spent or self._channel is None or self._channel.broken:
            return False
        return all(session is None or session.live for session in self._sessions)

    def exchange(self, state: RoundState, limit_s: float | None, ahead: bool) -> None:
        """Send RoundsNext and the state, and receive the trees in stream order."""
        assert self._channel is not None, "rounds without a connection are only recorded"
        message = draft_pb2.RoundsNext(
            rounds=self.id,
            number=self._numbers.take(),
            committed_upper=self._upper,
            chosen=self._take_untold(len(self._untold)),
        )
        self.num_exchanged += 1
        self.patient = limit_s is None
        if limit_s is not None and not self.answered:
            limit_s = max(limit_s, ENTER_LIMIT_S)
        self.limit_s = self._times.limit_s if limit_s is None else min(limit_s, self._times.limit_s)
        self._channel.exchange(
            message, state, self._buffer.trees.blob, self._buffer.expected, self.limit_s, ahead
        )

    def hand_over(self) -> None:
        if self._channel is not None:
            self._channel.hand_over()

    def carry(self, wanted: bool) -> None:
        if self._channel is not None:
            self._channel.carry(wanted)

    def draft(self, state: RoundState) -> DraftBatch:
        """Enqueue the check of the received trees, which replaces late or invalid trees by their roots."""
        trees = self._buffer.trees
        checked = tree_check(
            trees.number,
            self._buffer.expected,
            trees.num_nodes,
            trees.tokens,
            trees.parents,
            state.tokens,
            state.counts,
            vocab_size=self._vocab_size,
            depth=self._shape.depth,
        )
        return DraftBatch(
            checked.tokens, checked.parents, checked.depths, checked.num_nodes, checked.ancestors
        )

    def committed(self, tokens_per_row: Sequence[Sequence[int]]) -> None:
        self._num_committed += 1
        self._measure()
        self._untold.append([list(tokens) for tokens in tokens_per_row])
        for session, tokens in zip(self._sessions, tokens_per_row, strict=True):
            if session is not None and tokens:
                fence = session.fence
                prefix_hash = extend_prefix_hash(fence.prefix_hash, tokens)
                session.fence = Fence(
                    fence.session_id, fence.epoch, fence.committed_len + len(tokens), prefix_hash
                )

    def retire(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._sessions[row] = None

    def leave(self) -> None:
        """End the batch and leave the tokens of the last round pending in the sessions.

        The draft receives all earlier tokens that it has not received yet.
        """
        for row, session in enumerate(self._sessions):
            if session is None or not session.live or not self.num_exchanged:
                continue
            if self._num_committed != self.num_exchanged:
                session.lose("resync")
                continue
            tokens = self._untold[-1][row]
            session.base_len = session.fence.committed_len - len(tokens)
            session.token_ids = tokens
            session.features = []
            if self._state is not None and self._state.features.shape[2]:
                session.features.append(self._state.features[row, : len(tokens)].clone())
            session.answered()
        self._sessions = [None] * len(self._sessions)
        self._left(
            draft_pb2.RoundsLeave(rounds=self.id, chosen=self._take_untold(max(0, len(self._untold) - 1)))
        )

    def _measure(self) -> None:
        """Record the time since the previous round was read, which contains the wait for its trees."""
        now, before = time.monotonic(), self._read_at
        self._read_at = now
        if before is not None and self._channel is not None and not self._channel.broken:
            self._times.in_time(now - before)

    def _take_untold(self, count: int) -> list[draft_pb2.RoundTokens]:
        told, self._untold = self._untold[:count], self._untold[count:]
        return [
            draft_pb2.RoundTokens(
                counts=[len(row) for row in rows], token_ids=itertools.chain.from_iterable(rows)
            )
            for rows in told
        ]
