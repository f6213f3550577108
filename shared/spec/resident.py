"""The states and trees that a target and a draft in another process exchange in each round.

The target's host enqueues each round before it reads the result of the previous round. The enqueued work
sends the states, receives the trees and runs the verify pass.

A draft in another process implements the interface in `shared.spec.exchanged_slots`. A drafter in the
target's own process implements the interface in `shared.spec.device_drafter`.

The root of a tree is the last committed token of its sequence. committed_len is the number of committed
tokens, including the root. A feature row is the target's hidden state at one position, in the form that the
drafter uses (`shared.spec.drafter.FeatureSpec`).

A sequence must have a *slot* at the drafter to draft in these rounds. A sequence gets or leaves its slot
between two rounds. The slots that draft with the same tree shape in a round form a *group*. Each round
transfers two blobs. G is the number of rows of a group, and N is the number of nodes of its trees:

    states    for each group `RoundState.packed`: header, committed_lens, counts, tokens, features
    trees     for each group: header, then int32: num_nodes [G], tokens [G, N], parents [G, N];
              node 0 is the root, whose token and parent are ignored
    header    int32[64]; the first header of a blob contains the number of the round

In both blobs, the size of each group's part is a multiple of 256 bytes. Depths, ancestor masks and roots are
not sent, because the target's device computes them while it checks the trees (`kernels.tree_check`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.shared.base.errors import wrong_size

Buffer = bytes | memoryview

HEADER_BYTES = 256
ALIGNMENT = 256


def packed_bytes(bs: int, columns: int, feature_size: int, dtype: torch.dtype) -> int:
    """Return the size of `RoundState.packed` in bytes, a multiple of `ALIGNMENT`."""
    return _features_start(bs, columns) + _aligned(bs * columns * feature_size * dtype.itemsize)


def _features_start(bs: int, columns: int) -> int:
    return HEADER_BYTES + _aligned(4 * bs * (2 + columns))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Memory layout of the state of one group of slots (`RoundState.packed`).

    Attributes:
        counts: Binary format of `RoundState.counts`.
        columns: R, the number of columns of `RoundState.tokens`.
        features_start: Byte offset of the first feature row.
        row_bytes: Bytes of one feature row.
        num_bytes: Size of the state in bytes.
    """

    counts: struct.Struct
    columns: int
    features_start: int
    row_bytes: int
    num_bytes: int

    def features(self, packed: Buffer, start: int) -> Iterator[tuple[int, int]]:
        """Yield where the valid feature rows of each sequence begin and end, as byte offsets in the state.

        Args:
            packed: Memory that contains the state's header, committed lengths and counts.
            start: Byte offset of the state in this memory.
        """
        stride = self.columns * self.row_bytes
        counts = self.counts.unpack_from(packed, start + HEADER_BYTES + self.counts.size)
        for row, count in enumerate(counts):
            if count > 0:
                first = self.features_start + row * stride
                yield first, first + min(count, self.columns) * self.row_bytes


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Memory layout of a round's states: one group of slots after the other in one block of memory.

    A *compact* state contains only the parts of this block that are in use. For each group, these are all
    bytes before the feature rows, followed by the valid feature rows.

    Attributes:
        groups: The layout of each group.
    """

    groups: Sequence[GroupLayout]

    def used_bytes(self, packed: memoryview) -> int:
        """Return the offset of the end of the last group's last valid feature row."""
        start = sum(group.num_bytes for group in self.groups[:-1])
        used = self.groups[-1].features_start
        for _, stop in self.groups[-1].features(packed, start):
            used = stop
        return start + used

    def compact(self, packed: memoryview) -> list[memoryview]:
        """Return the parts of a compact state, given a copy of the block on the host."""
        parts, start = [], 0
        for group in self.groups:
            parts.append(packed[start : start + group.features_start])
            parts += [packed[start + first : start + last] for first, last in group.features(packed, start)]
            start += group.num_bytes
        return parts

    def expand(self, compact: Buffer, packed: memoryview) -> None:
        """Write the parts of a compact state to their places in a block.

        The rest of the block stays unchanged.

        Raises:
            ProtocolError: The compact state has a wrong size. In this case, the block stays unchanged.
        """
        data, at, start = memoryview(compact), 0, 0
        places: list[tuple[int, int, int]] = []
        for group in self.groups:
            if at + group.features_start > len(data):
                raise wrong_size(len(data), at + group.features_start)
            spans = [(0, group.features_start), *group.features(data, at)]
            for first, last in spans:
                places.append((start + first, at, last - first))
                at += last - first
            start += group.num_bytes
        if at != len(data):
            raise wrong_size(len(data), at)
        for to, source, num_bytes in places:
            packed[to : to + num_bytes] = data[source : source + num_bytes]


@dataclass(frozen=True, slots=True)
class RoundState:
    """The state of a batch between two rounds, on the device.

    `bs` is the padded size of the batch. Rows past the last sequence, and rows whose sequence has ended, are
    idle. An idle row has count 0 and root token 0. Readers must neither store nor move data for an idle row,
    and must ignore results computed for this row.

    R is the number of columns. For every tree shape that is drafted with this state, R is at least the tree's
    depth + 1.

    Attributes:
        committed_lens: ``[bs] int32``; number of committed tokens of the sequence, including the tokens of
            the last round. The root is the last committed token. In an idle row, the value can be any
            positive number.
        tokens: ``[bs, R] int32``; the tokens that the last round chose, padded with 0. These are the accepted
            drafts and then the bonus token. The root is in column ``counts - 1``.
        counts: ``[bs] int32``; number of valid entries in the row's `tokens` and `features`: 1 to R, or 0 if
            the row is idle.
        features: ``[bs, R, feature_size]``, in the KV pool's dtype for features. For i < counts, entry i of a
            row is the target's feature of position ``committed_len - 1 - counts + i``. The drafter uses this
            entry together with ``tokens[i]``, the token at index ``committed_len - counts + i``. Entries from
            `counts` on are undefined and may contain NaN. feature_size is 0 if the drafter uses no features.
        temperature: ``[bs] fp32``; 0 means greedy.
        seeds: ``[bs] int64``, the bit pattern of the request's seed.
        choices: ``[bs] int32``; index of the sequence among the n choices of its request.
        packed: ``[n] uint8``, one contiguous block of memory that is sent to a draft in another process. The
            block contains a header of `HEADER_BYTES` bytes with the round's number, then committed_lens,
            counts, tokens and, at a multiple of 256 bytes, features. These four tensors are views of the
            block. If the tensors are stored separately, `packed` is None.
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
        """Make a state in which all rows are idle.

        Its tensors can be written inside and outside torch's inference mode.
        """
        with torch.inference_mode(False):
            packed = torch.zeros(
                packed_bytes(bs, columns, feature_size, dtype), dtype=torch.uint8, device=device
            )
            return RoundState.of_packed(packed, bs, columns, feature_size, dtype)

    @staticmethod
    def of_packed(
        packed: torch.Tensor, bs: int, columns: int, feature_size: int, dtype: torch.dtype
    ) -> RoundState:
        """Make a state in which all rows are idle, in the block ``packed [packed_bytes] uint8``."""
        with torch.inference_mode(False):
            device, start = packed.device, _features_start(bs, columns)
            stop = start + bs * columns * feature_size * dtype.itemsize
            integers = packed[HEADER_BYTES : HEADER_BYTES + 4 * bs * (2 + columns)].view(torch.int32)
            committed_lens, counts, tokens = integers.split_with_sizes([bs, bs, bs * columns])
            committed_lens.fill_(1)
            counts.zero_()
            return RoundState(
                committed_lens=committed_lens,
                tokens=tokens.view(bs, columns),
                counts=counts,
                features=packed[start:stop].view(dtype).view(bs, columns, feature_size),
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
    def rows(self) -> GroupRows:
        """This state without `packed`, as the rows of a group."""
        return GroupRows(
            self.committed_lens,
            self.counts,
            self.tokens,
            self.features,
            self.temperature,
            self.seeds,
            self.choices,
        )

    @property
    def layout(self) -> GroupLayout:
        """The layout of `packed`."""
        row_bytes = self.features.shape[2] * self.features.element_size()
        start = _features_start(self.bs, self.columns)
        num_bytes = start + _aligned(self.bs * self.columns * row_bytes)
        return GroupLayout(struct.Struct(f"<{self.bs}i"), self.columns, start, row_bytes, num_bytes)


@dataclass(frozen=True, slots=True)
class StateBlob:
    """The states of all groups of a round, in one block of memory.

    Attributes:
        packed: ``[n] uint8``.
        layout: The layout of `packed`.
    """

    packed: torch.Tensor
    layout: StateLayout


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Sizes of one group of a round: rows, columns of the state, nodes per tree."""

    batch_size: int
    columns: int
    nodes: int


def state_starts(sizes: Sequence[GroupSize], feature_size: int, dtype: torch.dtype) -> list[int]:
    """Return the byte offset of each group's state in a round's blob, and then the size of the blob."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + packed_bytes(size.batch_size, size.columns, feature_size, dtype))
    return starts


def trees_starts(sizes: Sequence[GroupSize]) -> list[int]:
    """Return the byte offset of each group's trees in a round's blob, and then the size of the blob."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + trees_bytes(size.batch_size, size.nodes))
    return starts


@dataclass(frozen=True, slots=True)
class TreesBlob:
    """The draft trees of one group of slots, with a header, at a fixed memory address.

    Attributes:
        blob: ``[n] uint8``, the whole blob. The other attributes are views of it.
        number: ``[1] int32``, the number of the round.
        num_nodes: ``[bs] int32``.
        tokens, parents: ``[bs, N] int32``, with N nodes per tree.
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
            return cls.of(torch.zeros(trees_bytes(bs, nodes), dtype=torch.uint8, device=device), bs, nodes)

    @classmethod
    def of(cls, blob: torch.Tensor, bs: int, nodes: int) -> TreesBlob:
        """Return the views of trees in ``blob [trees_bytes] uint8``."""
        with torch.inference_mode(False):
            used = HEADER_BYTES + 4 * bs * (1 + 2 * nodes)
            number, rest = blob[:4].view(torch.int32), blob[HEADER_BYTES:used].view(torch.int32)
            num_nodes, tokens, parents = rest.split_with_sizes([bs, bs * nodes, bs * nodes])
            return cls(blob, number, num_nodes, tokens.view(bs, nodes), parents.view(bs, nodes))


def trees_bytes(bs: int, nodes: int) -> int:
    """Return the size of a `TreesBlob` in bytes, a multiple of `ALIGNMENT`."""
    return HEADER_BYTES + _aligned(4 * bs * (1 + 2 * nodes))
