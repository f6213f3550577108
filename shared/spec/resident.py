"""The seam between an engine that keeps its rounds on the device and a drafter that lives there too.

In the steady state nothing of a round passes through the host: the engine enqueues round n + 1 (the draft's extend and growth, the
verify pass, the walk) before it has read round n back. What one round leaves for the next is a `RoundState`: tensors that never move, so
that CUDA graphs may hold them. The host learns of every round one round late.

A composition of rows and a shape last from `DeviceDrafter.enter` to `ResidentBatch.leave`. In between, for every round, in this order:
`reserve` (host), then `draft` (enqueued, or part of a graph that is replayed). `committed` follows when that round was read back, usually
after the next `reserve` and `draft`.

Two blobs travel when target and draft are different processes:

    state     `RoundState.packed`: header, committed_lens, counts, tokens, features
    trees     header, then int32: num_nodes [bs], tokens [bs, N], parents [bs, N]; node 0 is the root, whose token and parent are ignored
    header    int32[64]; the first is the number of the round

Depths, masks and roots are not sent: the target's device makes them while it checks the trees (`kernels.tree_check`).
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from outrider.shared.spec.tree import DraftBatch, DraftShape

HEADER_BYTES = 256
ALIGNMENT = 256


def packed_bytes(bs: int, columns: int, feature_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of `RoundState.packed`."""
    return _features_start(bs, columns) + bs * columns * feature_size * dtype.itemsize


def _features_start(bs: int, columns: int) -> int:
    return HEADER_BYTES + -(-4 * bs * (2 + columns) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class PackedExtent:
    """Where the last feature row that counts ends in `RoundState.packed` of one size.

    Attributes:
        counts: The layout of the counts.
        columns: R.
        features_start, row_bytes: Where features begin, and the bytes of each row.
    """

    counts: struct.Struct
    columns: int
    features_start: int
    row_bytes: int

    def held_bytes(self, packed: memoryview) -> int:
        """Return how much of a copy of `packed` on the host says anything."""
        rows, columns = 0, self.columns
        for row, count in enumerate(self.counts.unpack_from(packed, HEADER_BYTES + self.counts.size)):
            if count > 0:
                rows = row * columns + min(count, columns)
        return self.features_start + rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class RoundState:
    """A batch between two rounds, on the device. `bs` is a bucket: rows past the sequences, and rows that ended, are idle.

    R, the columns, is at least depth + 1 of every shape that is drafted with this state. A row that is idle has count 0 and root token 0;
    whoever reads the state must neither store nor move anything for it, and whatever is computed for it is ignored.

    Attributes:
        committed_lens: ``[bs] int32``; chosen tokens of the sequence, those of the last round included; the root is the last of them. Any
            value ≥ 1 where the row is idle.
        tokens: ``[bs, R] int32``; what the last round chose: the accepted drafts, then the bonus token, padded with 0. The root is the one
            at column ``counts - 1``.
        counts: ``[bs] int32``; how many of `tokens` (and rows of `features`) hold: 1…R, or 0 where the row is idle.
        features: ``[bs, R, feature_size]``, in the dtype of the pool; row i < counts is the target's feature of position
            ``committed_len - 1 - counts + i``, which pairs with ``tokens[i]`` (the token at index ``committed_len - counts + i``). Rows
            from `counts` on hold anything, NaN included. A drafter that wants no features sees a width of 0.
        temperature: ``[bs] fp32``; 0 = greedy.
        seeds: ``[bs] int64``, the bit pattern of the request's seed.
        choices: ``[bs] int32``; index among the n choices of the request.
        packed: ``[n] uint8``, one contiguous piece of memory: `HEADER_BYTES` for a round's number, committed_lens, counts, tokens, then
            features on a boundary of 256 bytes, which all are views of it; what a draft elsewhere is sent. None where they are tensors of
            their own.
    """

    committed_lens: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    features: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor
    packed: torch.Tensor | None = None

    @staticmethod
    def idle(
        bs: int, columns: int, feature_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> RoundState:
        """Make a state of idle rows; its tensors may be written outside inference mode too."""
        with torch.inference_mode(False):
            packed = torch.zeros(
                packed_bytes(bs, columns, feature_size, dtype), dtype=torch.uint8, device=device
            )
            return RoundState.of_packed(packed, bs, columns, feature_size, dtype)

    @staticmethod
    def of_packed(
        packed: torch.Tensor, bs: int, columns: int, feature_size: int, dtype: torch.dtype
    ) -> RoundState:
        """Make a state of idle rows in ``packed [packed_bytes] uint8``."""
        with torch.inference_mode(False):
            device = packed.device
            integers = packed[HEADER_BYTES : HEADER_BYTES + 4 * bs * (2 + columns)].view(torch.int32)
            committed_lens, counts, tokens = integers.split_with_sizes([bs, bs, bs * columns])
            committed_lens.fill_(1)
            counts.zero_()
            return RoundState(
                committed_lens=committed_lens,
                tokens=tokens.view(bs, columns),
                counts=counts,
                features=packed[_features_start(bs, columns) :].view(dtype).view(bs, columns, feature_size),
                temperature=torch.zeros(bs, dtype=torch.float32, device=device),
                seeds=torch.zeros(bs, dtype=torch.int64, device=device),
                choices=torch.zeros(bs, dtype=torch.int32, device=device),
                packed=packed,
            )

    @property
    def bs(self) -> int:
        """Rows, idle ones included."""
        return self.committed_lens.shape[0]

    @property
    def columns(self) -> int:
        """R: the most tokens that a round may choose."""
        return self.tokens.shape[1]

    @property
    def extent(self) -> PackedExtent:
        """What tells how much of `packed` holds anything."""
        row_bytes = self.features.shape[2] * self.features.element_size()
        return PackedExtent(
            struct.Struct(f"<{self.bs}i"), self.columns, _features_start(self.bs, self.columns), row_bytes
        )

    def fill(self, tokens: Sequence[Sequence[int]], features: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        """Write fresh rows into the first rows of the state, in stream order.

        Args:
            tokens: For each row, its newest tokens, at most `columns`.
            features: For each row, pieces ``[rows, feature_size]`` that together hold one feature per token, or no piece; empty if no
                row has features.
        """
        host = torch.tensor(
            [[len(row), *row] + [0] * (self.columns - len(row)) for row in tokens], dtype=torch.int32
        )
        fresh = host.pin_memory().to(self.counts.device, non_blocking=True) if self.counts.is_cuda else host
        self.counts[: len(tokens)].copy_(fresh[:, 0])
        self.tokens[: len(tokens)].copy_(fresh[:, 1:])
        whole = [pieces[0] for pieces in features if len(pieces) == 1]
        if (
            whole
            and len(whole) == len(tokens)
            and len({(piece.shape[0], piece.device) for piece in whole}) == 1
        ):
            # Rows of one length travel in one copy.
            count = whole[0].shape[0]
            self.features[: len(tokens), :count].copy_(torch.stack(whole), non_blocking=True)
            return
        for row, pieces in enumerate(features):
            start = 0
            for piece in pieces:
                stop = start + piece.shape[0]
                self.features[row, start:stop].copy_(piece, non_blocking=True)
                start = stop

    def roots(self) -> torch.Tensor:
        """Return the last committed token of every row, ``[bs] int32``; 0 where the row is idle. Enqueued, no host."""
        last = (self.counts.to(torch.int64) - 1).clamp_(min=0)
        return self.tokens.gather(1, last[:, None])[:, 0]


class ResidentBatch(Protocol):
    """One composition of rows with one shape, between `enter` and `leave`. Engine thread only.

    Attributes:
        key: What the recorded work depends on beside the state's and the shape's sizes: addresses and widths of the drafter's static
            tensors (e.g. its page table's bucket), and what a graph has fixed of the sampling (e.g. whether any row is warm). Two rounds
            objects with the same key and the same state may share a graph; it may change in `reserve`, and the engine then records another.
    """

    key: Hashable

    def reserve(self, committed_upper: Sequence[int]) -> bool:
        """Make room on the host for one more round.

        Args:
            committed_upper: One per session: no larger than this is `committed_lens` when the round that is enqueued next starts. The round
                extends ≤ R rows and grows a tree behind them. Values do not shrink from call to call except for retired rows (then 0).

        Returns:
            False when there is no room: the engine then drains, leaves and goes the host's way. A grown page table is copied to its static
            place in stream order, so that the round that runs meanwhile still sees the old one.
        """
        ...

    def draft(self, state: RoundState) -> DraftBatch:
        """Enqueue one round of drafting: extend by the `counts` rows of `state`, grow, build the trees.

        Only enqueues (so that it can be captured): no host synchronisation, no branch on contents, the static tensors of this object and of
        `state` are read and the drafter's own pool is written. Reads `state`, never writes it. On a CPU it runs at once, by the same code.
        Whenever the engine captures, all rows of the state are idle and nothing may be stored that anybody reads.

        Returns:
            ``[state.bs, N]`` trees with N = the shape's `max_nodes`, node 0 the root; idle rows have ``num_nodes`` 1. `logprobs` may be
            None.
        """
        ...

    def committed(self, tokens_per_row: Sequence[Sequence[int]]) -> None:
        """Learn on the host what a round chose, when it has been read back: ≤ R tokens for each session, in the order of `enter`.

        Empty for a retired row. A round may be running meanwhile. Tokens after a stop are not told: such a row is retired.
        """
        ...

    def retire(self, rows: Sequence[int]) -> None:
        """Let rows go idle: their sequences ended, and `Drafter.close` of their sessions follows.

        Rows keep their places. From the next enqueued round on their count is 0; one that is enqueued already may still write to their
        pages, which the stream orders before anything that a next owner of the pages enqueues, so they may be freed at once.
        """
        ...

    def move(self, rows: Sequence[int], state: RoundState) -> bool:
        """Go on with these rows alone, from the next enqueued round on: row i of `state` is what row ``rows[i]`` was until now.

        The engine fills the new state itself, in stream order behind the rounds that are on their way; all later calls speak of its rows.
        No row that goes on is left out.

        Returns:
            False when these rounds cannot move: nothing has changed then, and the engine leaves and enters anew.
        """
        ...

    def leave(self) -> None:
        """End the rounds, after every enqueued one was read back and told by `committed`.

        The sessions of rows that were not retired are then as if every commit had come the host's way: what `committed` told last is
        pending with its features (those of the state, which may be reused right after this call, so they are copied in stream order). A
        batch that was entered and left without a round is as it was before.
        """
        ...


@runtime_checkable
class ExchangedBatch(ResidentBatch, Protocol):
    """Rounds of a drafter in another process: the state goes there and the trees come, outside of what is recorded.

    For every round: `reserve`, `exchange`, then `draft`, which only checks on the device what came, and so can be part of a graph; then
    `hand_over` and, before the next round, `carry`, whatever happened after `exchange`.
    """

    def exchange(self, state: RoundState, limit_s: float | None, ahead: bool) -> None:
        """Hand the state of the round that is enqueued next over, and have its trees come, in stream order; never captured.

        It may block the host until they are there, or only enqueue. Either way they are waited for no longer than a bound, and `draft` then
        yields trees of one node.

        Args:
            state: What `draft` will be given.
            limit_s: How long the device may stand still for the trees; None: until the draft counts as faulty.
            ahead: The device may wait for what the host does in `hand_over` and `carry`: what is enqueued in between was enqueued before,
                and the host does not have to wait for the device to enqueue it, as it may for what runs for the first time.
        """
        ...

    def hand_over(self) -> None:
        """Do on the host what `exchange` has left to do for the state: waits until the round before it has ended."""
        ...

    def carry(self, wanted: bool) -> None:
        """Do on the host what `exchange` has left to do for the trees; they are not waited for if nobody wants them any more."""
        ...


@runtime_checkable
class DeviceDrafter(Protocol):
    """What a `Drafter` with `device_resident` = True offers beside the seam of the host. Engine thread only."""

    def enter(self, session_ids: Sequence[int], shape: DraftShape, state: RoundState) -> ResidentBatch | None:
        """Start rounds on the device for these sessions; session i is row i of `state`, further rows are idle.

        The engine has filled `committed_lens`, `temperature`, `seeds` and `choices`, and made every row idle. This call makes the drafter's
        static tensors ready and fills `tokens`, `counts` and `features` of the sessions' rows from the commits that are pending (at least
        the root's), in stream order. The session has been told every commit before.

        Returns:
            The rounds; or None when it cannot be now (a session is unknown or lacks features, more rows are pending than R, no room):
            `state` then still holds idle rows only, the engine goes the host's way for this round, and may ask again at the next.
        """
        ...

    def rounds_for_capture(self, shape: DraftShape, state: RoundState) -> ResidentBatch:
        """Return rounds without sessions: all rows are idle, to record the graphs of this shape and batch before anybody is served."""
        ...


@dataclass(frozen=True, slots=True)
class TreesBlob:
    """Trees with their header, in memory that never moves.

    Attributes:
        blob: ``[n] uint8``, all of it.
        number: ``[1] int32``, view.
        num_nodes: ``[bs] int32``, view.
        tokens, parents: ``[bs, N] int32``, views.
    """

    blob: torch.Tensor
    number: torch.Tensor
    num_nodes: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def make(cls, bs: int, nodes: int, device: torch.device) -> TreesBlob:
        """Make one of zeros."""
        with torch.inference_mode(False):
            blob = torch.zeros(trees_bytes(bs, nodes), dtype=torch.uint8, device=device)
            number, rest = blob[:4].view(torch.int32), blob[HEADER_BYTES:].view(torch.int32)
            num_nodes, tokens, parents = rest.split_with_sizes([bs, bs * nodes, bs * nodes])
            return cls(blob, number, num_nodes, tokens.view(bs, nodes), parents.view(bs, nodes))


def trees_bytes(bs: int, nodes: int) -> int:
    """Return the bytes of a `TreesBlob`."""
    return HEADER_BYTES + 4 * bs * (1 + 2 * nodes)
