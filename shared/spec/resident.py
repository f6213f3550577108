"""Interface between a target and a draft in different processes whose rounds stay on both devices.

In the steady state, no part of a round passes through the hosts. The target enqueues round n + 1 (sending the
state, receiving the trees, the verify pass) before it has read round n back. The result of one round is the
input of the next: a `RoundState`, whose tensors never move, so that CUDA graphs may refer to them. The host
reads the result of every round one round late.

A drafter in the target's process has another interface (`shared.spec.device_drafter`).

Terms: the root of a tree is the last committed token of its sequence, and committed_len counts the committed
tokens, the root included. A feature row is the target's hidden state at one position, in the form that the
drafter uses (`shared.spec.drafter.FeatureSpec`).

A batch has fixed rows and a fixed tree shape from `ExchangeDrafter.enter` to `ResidentBatch.leave`. Every
round of the batch runs these steps in order:

1. `reserve`, on the host.
2. `draft`, enqueued or replayed as part of a graph.
3. `committed`, after the round was read back. By then, the next round's `reserve` and `draft` have usually
   run.

If target and draft are different processes, each round transfers two blobs:

    state     `RoundState.packed`: header, committed_lens, counts, tokens, features
    trees     header, then int32: num_nodes [bs], tokens [bs, N], parents [bs, N];
              node 0 is the root, whose token and parent are ignored
    header    int32[64]; the first contains the number of the round

Depths, masks and roots are not sent. The target's device computes them while it checks the trees
(`kernels.tree_check`).
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from outrider.shared.spec.drafter import Drafter
from outrider.shared.spec.tree import DraftBatch, DraftShape

HEADER_BYTES = 256
ALIGNMENT = 256


def packed_bytes(bs: int, columns: int, feature_size: int, dtype: torch.dtype) -> int:
    """Return the size of `RoundState.packed` in bytes."""
    return _features_start(bs, columns) + bs * columns * feature_size * dtype.itemsize


def _features_start(bs: int, columns: int) -> int:
    return HEADER_BYTES + -(-4 * bs * (2 + columns) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class PackedExtent:
    """Computes how many bytes of `RoundState.packed` are in use, up to the end of the last valid feature row.

    Attributes:
        counts: The binary layout of the counts.
        columns: R, the number of columns of the state.
        features_start: Byte offset of the first feature row.
        row_bytes: Bytes of one feature row.
    """

    counts: struct.Struct
    columns: int
    features_start: int
    row_bytes: int

    def used_bytes(self, packed: memoryview) -> int:
        """Return the number of bytes in use, given a copy of `packed` on the host."""
        rows, columns = 0, self.columns
        for row, count in enumerate(self.counts.unpack_from(packed, HEADER_BYTES + self.counts.size)):
            if count > 0:
                rows = row * columns + min(count, columns)
        return self.features_start + rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class RoundState:
    """The state of a batch between two rounds, on the device.

    `bs` is a bucket size. Rows past the last sequence, and rows whose sequence has ended, are idle. An idle
    row has count 0 and root token 0. Readers must neither store nor move data for an idle row, and must
    ignore results computed for it.

    R, the number of columns, is at least depth + 1 for every tree shape that is drafted with this state.

    Attributes:
        committed_lens: ``[bs] int32``; number of committed tokens of the sequence, including the tokens of
            the last round. The root is the last committed token. An idle row has any value ≥ 1.
        tokens: ``[bs, R] int32``; the tokens that the last round chose, padded with 0. These are the accepted
            drafts and then the bonus token. The root is in column ``counts - 1``.
        counts: ``[bs] int32``; number of valid columns of `tokens` and of valid rows of `features`: 1…R, or 0
            if the row is idle.
        features: ``[bs, R, feature_size]``, in the pool's dtype. For i < counts, row i is the target's
            feature of position ``committed_len - 1 - counts + i``. This row pairs with ``tokens[i]``, the
            token at index ``committed_len - counts + i``. Rows from `counts` on are undefined and may contain
            NaN. feature_size is 0 if the drafter uses no features.
        temperature: ``[bs] fp32``; 0 = greedy.
        seeds: ``[bs] int64``, the bit pattern of the request's seed.
        choices: ``[bs] int32``; index of the sequence among the n choices of its request.
        packed: ``[n] uint8``, one contiguous block of memory that is sent to a draft in another process. It
            starts with `HEADER_BYTES` for the round's number. Then follow committed_lens, counts and tokens,
            and then features at a multiple of 256 bytes. These four tensors are views of the block. None if
            they are separate tensors.
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
        """Make a state of idle rows. The tensors may be written both inside and outside inference mode."""
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
        """Number of rows, including idle ones."""
        return self.committed_lens.shape[0]

    @property
    def columns(self) -> int:
        """R, the largest number of tokens that a round may choose per row."""
        return self.tokens.shape[1]

    @property
    def extent(self) -> PackedExtent:
        """The `PackedExtent` of this state, which computes how many bytes of `packed` are in use."""
        row_bytes = self.features.shape[2] * self.features.element_size()
        return PackedExtent(
            struct.Struct(f"<{self.bs}i"), self.columns, _features_start(self.bs, self.columns), row_bytes
        )

    def fill(self, tokens: Sequence[Sequence[int]], features: Sequence[Sequence[torch.Tensor]] = ()) -> None:
        """Write fresh rows into the first rows of the state, in stream order.

        Args:
            tokens: For each row, its newest tokens. A row may have at most `columns` tokens.
            features: For each row, a list of tensors ``[n, feature_size]``. Together they contain one feature
                row per token. A row without features has an empty list. The whole argument is empty if no row
                has features.
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
            # If all rows have equally many tokens, a single copy transfers them.
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
        """Return the last committed token of every row, ``[bs] int32``, or 0 for idle rows. Does not wait."""
        last = (self.counts.to(torch.int64) - 1).clamp_(min=0)
        return self.tokens.gather(1, last[:, None])[:, 0]


class ResidentBatch(Protocol):
    """Rounds of a fixed set of rows and one tree shape, between `enter` and `leave`. Engine thread only.

    Attributes:
        key: Identifies everything that a recorded graph depends on, except the size of the state and the tree
            shape. This includes addresses and widths of the drafter's static tensors (e.g. the bucket of its
            page table) and the sampling mode fixed in the graph (e.g. whether any row has a temperature above
            0). Two batches with the same key and the same state may share a graph. The key may change in
            `reserve`. The engine then records another graph.
    """

    key: Hashable

    def reserve(self, committed_upper: Sequence[int]) -> bool:
        """Reserve host-side resources (e.g. pages) for one more round.

        If the page table grows, it is copied to its static tensor in stream order. The round that is still
        running therefore reads the old page table.

        Args:
            committed_upper: For each session, an upper bound of its `committed_lens` at the start of the
                round to be enqueued next. That round extends the sequence by ≤ R rows and grows a tree behind
                these rows. Bounds never shrink from one call to the next, except that a retired row has 0.

        Returns:
            False if there is no room. The engine then waits for the rounds in flight, leaves, and runs its
            rounds through the host.
        """
        ...

    def draft(self, state: RoundState) -> DraftBatch:
        """Enqueue one round of drafting: extend by the `counts` rows of `state`, then grow the trees.

        A CUDA graph must be able to capture this method, so it only enqueues. It never synchronises with the
        host or branches on the contents of tensors. It reads `state` and the static tensors of this object,
        and writes the drafter's own pool. It never writes `state`. On a CPU, the same code runs immediately.

        During a capture, all rows of the state are idle. No data may then be stored that is read later.

        Returns:
            ``[state.bs, N]`` trees, where N is the shape's `max_nodes` and node 0 is the root. Idle rows have
            ``num_nodes`` 1. `logprobs` may be None.
        """
        ...

    def committed(self, tokens_per_row: Sequence[Sequence[int]]) -> None:
        """Receive the result of a round: at most R tokens per session, in the session order of `enter`.

        The entry of a retired row is empty. A row is retired when it stops, so no tokens after the stop are
        included. Another round may be running during this call.
        """
        ...

    def retire(self, rows: Sequence[int]) -> None:
        """Make rows idle because their sequences have ended. The caller then calls `Drafter.close` for them.

        All rows keep their row numbers. From the next enqueued round on, the count of the retired rows is 0.

        A round that is already enqueued may still write to the pages of these rows. The pages may
        nevertheless be freed immediately, because stream order puts those writes before all work of the
        pages' next owner.
        """
        ...

    def leave(self) -> None:
        """End the rounds, after every enqueued round was read back and passed to `committed`.

        The tokens of the last `committed` stay pending with their features, as if every commit had come
        through the host. These features are copied from the state in stream order, because the state may be
        reused right after this call. If no round has run since `enter`, the sessions are in the same state as
        before `enter`.
        """
        ...


@runtime_checkable
class ExchangedBatch(ResidentBatch, Protocol):
    """Rounds of a drafter in another process. Recorded graphs exclude the transfers of state and trees.

    In each round, call `reserve`, `exchange`, `draft` and `hand_over`, in this order. Call `carry` after
    them, before the next round. `draft` only checks the received trees on the device, so it can be part of a
    graph. After `exchange`, call `hand_over` and `carry` even if an error occurs in between.
    """

    @property
    def others_s(self) -> float:
        """Longest time in seconds for which a round with other rows waits for trees of rows in mode `on`."""
        ...

    def exchange(self, state: RoundState, limit_s: float | None, ahead: bool) -> None:
        """Send the state of the next round and receive its trees, in stream order. Never captured.

        This either blocks the host until the trees have arrived, or only enqueues the wait for them. In both
        cases the wait is bounded. If the trees do not arrive in time, `draft` returns trees of one node.

        Args:
            state: The state that `draft` will receive.
            limit_s: Longest time that the device may wait for the trees. None means to wait as long as rows
                in mode `on` do.
            ahead: True if the device may wait for work that the host does in `hand_over` and `carry`. All
                work that the caller enqueues in between must then have run before. The first run of other
                work could make the host wait for the device while the device waits for the host.
        """
        ...

    def hand_over(self) -> None:
        """Do the host's remaining part of sending the state. Wait until the previous round has ended."""
        ...

    def carry(self, wanted: bool) -> None:
        """Do the host's remaining part of receiving the trees. Waits for the trees only if `wanted`."""
        ...


@runtime_checkable
class ExchangeDrafter(Drafter, Protocol):
    """A drafter in another process that exchanges rounds with this device while `device_resident` is True.

    Engine thread only.
    """

    def enter(self, session_ids: Sequence[int], shape: DraftShape, state: RoundState) -> ResidentBatch | None:
        """Start rounds on the device for these sessions.

        Session i becomes row i of `state`. All further rows are idle.

        Before the call:

        - The engine has filled `committed_lens`, `temperature`, `seeds` and `choices`, and made every row
          idle.
        - Every session has received all of its commits.

        This call prepares the drafter's static tensors. It also fills `tokens`, `counts` and `features` of
        the sessions' rows from the pending commits (at least the root's), in stream order.

        Returns:
            The rounds, or None if they cannot start now. Possible reasons are that a session is unknown or
            lacks features, that more than R rows are pending, or that there is no room. `state` then still
            has idle rows only. The engine runs this round through the host, and may call `enter` again in the
            next round.
        """
        ...

    def rounds_for_capture(self, shape: DraftShape, state: RoundState) -> ResidentBatch:
        """Return a batch of idle rows without sessions, with which the graphs are recorded at start-up."""
        ...


@dataclass(frozen=True, slots=True)
class TreesBlob:
    """Trees with their header, in memory that never moves.

    Attributes:
        blob: ``[n] uint8``, the whole blob. The other attributes are views of it.
        number: ``[1] int32``, the number of the round.
        num_nodes: ``[bs] int32``.
        tokens, parents: ``[bs, N] int32``.
    """

    blob: torch.Tensor
    number: torch.Tensor
    num_nodes: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def make(cls, bs: int, nodes: int, device: torch.device) -> TreesBlob:
        """Make a blob of zeros."""
        with torch.inference_mode(False):
            blob = torch.zeros(trees_bytes(bs, nodes), dtype=torch.uint8, device=device)
            number, rest = blob[:4].view(torch.int32), blob[HEADER_BYTES:].view(torch.int32)
            num_nodes, tokens, parents = rest.split_with_sizes([bs, bs * nodes, bs * nodes])
            return cls(blob, number, num_nodes, tokens.view(bs, nodes), parents.view(bs, nodes))


def trees_bytes(bs: int, nodes: int) -> int:
    """Return the size of a `TreesBlob` in bytes."""
    return HEADER_BYTES + 4 * bs * (1 + 2 * nodes)
