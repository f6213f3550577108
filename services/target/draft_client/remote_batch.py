"""Rounds that stay on the device with a draft in another process: `ExchangedBatch` over a connection.

What is told when: the draft learns of a batch by RoundsEnter; of each round by RoundsNext, as soon as it is enqueued here, so that it can
enqueue its part; of what rounds chose by the messages after they were read. What the last round chose stays pending in the sessions with
its features, as if it had come the host's way, when the rounds are left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from outrider.draft.v1 import draft_pb2
from outrider.kernels.tree_check import tree_check
from outrider.services.target.draft_client.fences import fence_to_proto
from outrider.services.target.draft_client.session import DraftSession
from outrider.services.target.draft_client.transport.rounds_channel import RoundsChannel
from outrider.shared.rpc.tensors import wire_dtype
from outrider.shared.spec.fence import Fence, extend_prefix_hash
from outrider.shared.spec.resident import RoundState, TreesBlob
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass(frozen=True, slots=True)
class TreesBuffer:
    """Where the trees of rounds of one size come to.

    Attributes:
        trees: What came.
        expected: ``[1] int32``, the number that it must have.
    """

    trees: TreesBlob
    expected: torch.Tensor

    @classmethod
    def make(cls, bs: int, nodes: int, device: torch.device) -> TreesBuffer:
        """Make one of zeros."""
        with torch.inference_mode(False):
            return cls(TreesBlob.make(bs, nodes, device), torch.zeros(1, dtype=torch.int32, device=device))


def size_message(shape: DraftShape, state: RoundState) -> draft_pb2.RoundsEnter:
    """Return what names a size of rounds: the message that would begin them, without rows."""
    return draft_pb2.RoundsEnter(
        shape=draft_pb2.Shape(depth=shape.depth, topk=shape.topk, max_nodes=shape.max_nodes),
        batch=state.bs,
        columns=state.columns,
        feature_size=state.features.shape[2],
        feature_dtype=wire_dtype(state.features.dtype),
    )


ENTER_LIMIT_S = 0.2
"""How long decoding stands still for the draft's answer, which comes when it has taken in the prompts' rows."""
MAX_ROUND_NUMBER = 1 << 30
"""Half of what an int32 header holds, and what the words of a mailbox end with lies above: months of rounds."""


class ExchangeNumbers:
    """Numbers of rounds, not used twice until they are spent: a header of an older connection is not taken for one of this.

    They ascend as long as a connection lasts, since streams wait for a number or a greater one.
    """

    def __init__(self) -> None:
        self._last = 0

    @property
    def spent(self) -> bool:
        """Whether it is time to `restart`; those of rounds that are under way may still be taken."""
        return self._last >= MAX_ROUND_NUMBER

    def restart(self) -> None:
        """Begin again, for a connection that has not seen any."""
        self._last = 0

    def take(self) -> int:
        """Return the next one."""
        self._last += 1
        return self._last


class RemoteBatch:
    """See `ExchangedBatch`.

    Args:
        channel: Of the connection; None to record rounds without any.
        sessions: In the order of the state's rows, each with 1 to R pending tokens.
        shape: Of every tree.
        buffer: Where trees come to.
        vocab_size: Of the target.
        patience_s: How long the trees of a round are waited for at most.
        numbers: Of rounds.
        left: Called at the end with the message for the draft.

    Attributes:
        id: Names these rounds.
        answered: The draft has said whether it takes part. What it has yet to do before the first trees is waited for with them else.
        ended: The draft wants them to end, or knows nothing of them.
        num_exchanged: Rounds so far.
        patient: The last of them was to be waited for as long as it takes.
    """

    def __init__(
        self,
        channel: RoundsChannel | None,
        sessions: Sequence[DraftSession],
        shape: DraftShape,
        buffer: TreesBuffer,
        *,
        vocab_size: int,
        patience_s: float,
        numbers: ExchangeNumbers,
        left: Callable[[draft_pb2.RoundsLeave], None] = lambda _message: None,
    ) -> None:
        self.id = numbers.take()
        self.answered = False
        self.ended = False
        self.num_exchanged = 0
        self.patient = False
        self.key: Hashable = ("remote", buffer.trees.blob.data_ptr())
        self._channel = channel
        self._sessions: list[DraftSession | None] = list(sessions)
        self._shape = shape
        self._buffer = buffer
        self._vocab_size = vocab_size
        self._patience_s = patience_s
        self._numbers = numbers
        self._left = left
        self._upper: Sequence[int] = ()
        self._untold: list[list[list[int]]] = []
        self._num_committed = 0
        self._state: RoundState | None = None

    def entering(self, state: RoundState) -> draft_pb2.RoundsEnter:
        """Return the message that begins them."""
        message = size_message(self._shape, state)
        message.rounds = self.id
        for session in self._sessions:
            assert session is not None, "all rows are there at the beginning"
            message.rows.add(
                fence=fence_to_proto(session.fence), base_len=session.base_len, token_ids=session.token_ids
            )
        return message

    def fill(self, state: RoundState) -> None:
        """Move what is pending into the first rows of the state, in stream order; it stays pending until a round was read."""
        self._state = state
        pending = [session for session in self._sessions if session is not None]
        state.fill(
            [session.token_ids for session in pending],
            [session.features for session in pending] if state.features.shape[2] else (),
        )

    def reserve(self, committed_upper: Sequence[int]) -> bool:
        """See `ResidentBatch.reserve`. False too when the draft has had enough, or has been late, and when the numbers are spent."""
        self._upper = committed_upper
        if self.ended or self._numbers.spent or self._channel is None or self._channel.broken:
            return False
        return all(session is None or session.live for session in self._sessions)

    def exchange(self, state: RoundState, limit_s: float | None, ahead: bool) -> None:
        """See `ExchangedBatch.exchange`."""
        assert self._channel is not None, "rounds without a connection are only recorded"
        message = draft_pb2.RoundsNext(
            rounds=self.id,
            number=self._numbers.take(),
            committed_upper=self._upper,
            chosen=self._take_untold(len(self._untold)),
        )
        self.num_exchanged += 1
        self.patient = limit_s is None or limit_s >= self._patience_s
        if limit_s is not None and not self.answered:
            limit_s = max(limit_s, ENTER_LIMIT_S)
        limit_s = self._patience_s if limit_s is None else min(limit_s, self._patience_s)
        self._channel.exchange(message, state, self._buffer.trees.blob, self._buffer.expected, limit_s, ahead)

    def hand_over(self) -> None:
        """See `ExchangedBatch.hand_over`."""
        if self._channel is not None:
            self._channel.hand_over()

    def carry(self, wanted: bool) -> None:
        """See `ExchangedBatch.carry`."""
        if self._channel is not None:
            self._channel.carry(wanted)

    def draft(self, state: RoundState) -> DraftBatch:
        """See `ResidentBatch.draft`: what came, if it is of this round and a tree."""
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
        """See `ResidentBatch.committed`."""
        self._num_committed += 1
        self._untold.append([list(tokens) for tokens in tokens_per_row])
        for session, tokens in zip(self._sessions, tokens_per_row, strict=True):
            if session is not None and tokens:
                fence = session.fence
                prefix_hash = extend_prefix_hash(fence.prefix_hash, tokens)
                session.fence = Fence(
                    fence.session_id, fence.epoch, fence.committed_len + len(tokens), prefix_hash
                )

    def retire(self, rows: Sequence[int]) -> None:
        """See `ResidentBatch.retire`."""
        for row in rows:
            self._sessions[row] = None

    def move(self, rows: Sequence[int], state: RoundState) -> bool:
        """See `ResidentBatch.move`; the draft has tables of its own, made for the rows of `enter`."""
        return False

    def leave(self) -> None:
        """See `ResidentBatch.leave`. The draft is told all that was not told, but for what the last round chose, which is pending."""
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

    def _take_untold(self, count: int) -> list[draft_pb2.RoundTokens]:
        told, self._untold = self._untold[:count], self._untold[count:]
        return [
            draft_pb2.RoundTokens(
                counts=[len(row) for row in rows], token_ids=itertools.chain.from_iterable(rows)
            )
            for rows in told
        ]
