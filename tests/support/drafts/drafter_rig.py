"""A fake target that drives an in-process drafter through the host or in rounds on the device.

On the device, the rig plays the part of the target's slots: the tokens and features of the last round stay
on the device, some streams draft in a round and others do not, and the drafter learns each result one round
late.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from outrider.kernels.packed_round import GroupRows
from outrider.services.draft.inproc import InprocDrafter
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.device_drafter import SeatedGroup
from outrider.shared.spec.drafter import Commit, Commits, ProposalRequest, ProposalRow, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass
class Stream:
    """A synthetic sequence. The caller chooses its tokens, and its number determines its features.

    Attributes:
        told: Number of committed tokens that the drafter has received in either way.
        fresh: Number of tokens that the last round chose, i.e. of rows in the stream's slot.
        continuous: True if the stream drafted in the last round on the device.
        unread: The tokens of the rounds that the host has not read, and whether the stream drafted in them.
    """

    session_id: int
    tokens: list[int]
    temperature: float
    seed: int
    told: int = 0
    fresh: int = 1
    continuous: bool = False
    unread: list[tuple[list[int], bool]] = field(default_factory=list)

    def fence(self, length: int | None = None) -> Fence:
        known = self.tokens[:length]
        return Fence(self.session_id, 1, len(known), extend_prefix_hash(FNV_OFFSET, known))


@dataclass
class Rig:
    """A drafter and the sequences for which it drafts.

    Args:
        drafter: The drafter.
        feature_size: Width of the synthetic features. 0 if there are none.
        device: Device of the features.
        vocab_size: Upper bound of the tokens, exclusive.
        graphs: Cache that records the rounds on the device.
    """

    drafter: InprocDrafter
    feature_size: int
    device: torch.device
    vocab_size: int
    graphs: GraphCache
    streams: list[Stream] = field(default_factory=list)
    _round: int = 0
    _rows: dict[tuple[int, int], GroupRows] = field(default_factory=dict)

    def feature_rows(self, stream: Stream, begin: int, end: int) -> torch.Tensor | None:
        if not self.feature_size:
            return None
        rows = [
            torch.randn(
                self.feature_size,
                generator=torch.Generator().manual_seed(stream.session_id * 10_000 + position),
            )
            for position in range(begin, end)
        ]
        return torch.stack(rows).to(self.device)

    def open(self, session_id: int, prompt: Sequence[int], temperature: float) -> Stream:
        """Open a sequence. The last token of `prompt` is the first one that a target would have generated."""
        stream = self._open(session_id, prompt, temperature)
        rows = self.feature_rows(stream, 0, len(prompt) - 1)
        if rows is not None:
            self.drafter.features(session_id, 0, rows)
        self.commit(stream, [])
        return stream

    def _open(self, session_id: int, prompt: Sequence[int], temperature: float) -> Stream:
        stream = Stream(session_id, list(prompt), temperature, seed=session_id * 77 + 5)
        stream.told = len(prompt) - 1
        self.drafter.open(
            [SequenceOpen(stream.fence(stream.told), stream.tokens[:-1], stream.seed, temperature)]
        )
        self.streams.append(stream)
        return stream

    def commit(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Append `tokens`, and commit all tokens since the last commit through the host."""
        stream.tokens.extend(tokens)
        base = stream.told
        rows = self.feature_rows(stream, base - 1, len(stream.tokens) - 1)
        self.drafter.commit(Commits(self._round, [Commit(stream.fence(), base, stream.tokens[base:], rows)]))
        stream.told = len(stream.tokens)

    def propose(self, streams: Sequence[Stream], shape: DraftShape) -> DraftBatch:
        self._round += 1
        rows = [ProposalRow(stream.fence(), stream.tokens[-1], shape) for stream in streams]
        return self.drafter.propose(ProposalRequest(self._round, rows, None))

    def begin(self, session_id: int, prompt: Sequence[int], temperature: float) -> Stream:
        """Open a sequence like `open`, for rounds on the device."""
        stream = self._open(session_id, prompt, temperature)
        stream.unread.append(([prompt[-1]], False))
        return stream

    def launch(
        self, streams: Sequence[Stream], shape: DraftShape, bs: int, columns: int
    ) -> tuple[DraftBatch, SeatedGroup]:
        """Draft for these streams on the device, as the engine does. Row i is the tree of stream i.

        Args:
            streams: Streams that draft in this round with `shape`.
            shape: A bounded shape.
            bs: Number of rows. Rows behind the streams are idle.
            columns: Number of columns of the state.
        """
        self.supply(streams)
        upper = [len(stream.tokens) for stream in streams]
        seated = self.drafter.seat([one.session_id for one in streams], upper, shape, bs, columns)
        rows, key = self.rows(bs, columns), (seated.key, shape, bs, columns)
        if not self.graphs.holds(key):
            self.graphs.capture(key, lambda: seated.draft(rows))  # all rows are idle
        seated.load()
        for row, stream in enumerate(streams):
            self.fill(rows, row, stream)
        drafts = self.graphs.run(key, lambda: seated.draft(rows))
        return drafts, seated

    def supply(self, streams: Sequence[Stream]) -> None:
        """Supply the rows that streams lack because they did not draft in the last round."""
        behind = [stream for stream in streams if not stream.continuous]
        for stream in behind:
            lacking = self.drafter.lacking(stream.session_id)
            assert lacking is not None, "the drafter must follow the stream"
            stop = min(lacking.stop, stream.told - 1)
            rows = self.feature_rows(stream, lacking.start, stop) if lacking.start < stop else None
            if rows is not None:
                self.drafter.features(stream.session_id, lacking.start, rows)
        self.drafter.catch_up([stream.session_id for stream in behind])

    def rows(self, bs: int, columns: int) -> GroupRows:
        """Return rows at fixed addresses, all of them idle."""
        if (bs, columns) not in self._rows:
            integers = torch.zeros((3, bs), dtype=torch.int32, device=self.device)
            self._rows[bs, columns] = GroupRows(
                committed_lens=integers[0],
                counts=integers[1],
                tokens=torch.zeros((bs, columns), dtype=torch.int32, device=self.device),
                features=torch.zeros((bs, columns, self.feature_size), device=self.device),
                temperature=torch.zeros(bs, device=self.device),
                seeds=torch.zeros(bs, dtype=torch.int64, device=self.device),
                choices=integers[2],
            )
        rows = self._rows[bs, columns]
        rows.committed_lens.fill_(1)
        rows.counts.zero_()
        rows.tokens.zero_()
        rows.features.fill_(torch.nan)  # values outside the rows must not be read
        return rows

    def fill(self, rows: GroupRows, row: int, stream: Stream) -> None:
        """Write the state that the last round has left in the stream's slot."""
        count, length = stream.fresh, len(stream.tokens)
        rows.committed_lens[row] = length
        rows.counts[row] = count
        rows.tokens[row, :count] = torch.tensor(stream.tokens[-count:], dtype=torch.int32)
        rows.temperature[row] = stream.temperature
        rows.seeds[row] = stream.seed
        features = self.feature_rows(stream, length - 1 - count, length - 1)
        if features is not None:
            rows.features[row, :count] = features

    def advance(self, stream: Stream, tokens: Sequence[int], *, drafted: bool) -> None:
        """Let a round choose tokens, which the host has not read yet."""
        stream.tokens.extend(tokens)
        stream.fresh = len(tokens)
        stream.continuous = drafted
        stream.unread.append((list(tokens), drafted))

    def read(self, streams: Sequence[Stream]) -> None:
        """Let the host read all rounds, and tell the drafter their tokens."""
        for stream in streams:
            for tokens, drafted in stream.unread:
                self.drafter.committed(stream.session_id, tokens, drafted=drafted)
                stream.told += len(tokens)
            stream.unread.clear()

    def end(self, stream: Stream) -> None:
        """End a sequence."""
        self.streams.remove(stream)
        self.drafter.close([stream.session_id])


def accepted(trees: DraftBatch, row: int, wanted: int, bonus: int) -> list[int]:
    """Return tokens that a target may choose: up to `wanted` nodes of the first path, then a bonus token."""
    tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
    at, chosen = 0, list[int]()
    for node in range(1, int(trees.num_nodes[row])):
        if len(chosen) < wanted and parents[node] == at:
            chosen.append(tokens[node])
            at = node
    return [*chosen, bonus]


def assert_same_trees(have: DraftBatch, row: int, want: DraftBatch, wanted_row: int) -> None:
    nodes = int(want.num_nodes[wanted_row])
    assert int(have.num_nodes[row]) == nodes
    for name in ("tokens", "parents", "depths"):
        assert (
            getattr(have, name)[row, :nodes].tolist() == getattr(want, name)[wanted_row, :nodes].tolist()
        ), name
    words = min(have.ancestors.shape[2], want.ancestors.shape[2])
    assert have.ancestors[row, :nodes, :words].tolist() == want.ancestors[wanted_row, :nodes, :words].tolist()
    assert have.logprobs is not None
    assert want.logprobs is not None
    torch.testing.assert_close(
        have.logprobs[row, :nodes].cpu(), want.logprobs[wanted_row, :nodes].cpu(), atol=1e-3, rtol=1e-3
    )


def open_streams(*rigs: Rig, on_device: Collection[Rig] = ()) -> list[list[Stream]]:
    """Open the same sequences in all rigs. Some are greedy, some are longer than a round's columns."""
    lengths, temperatures = (2, 9, 30, 4), (0.0, 0.8, 0.0, 1.3)
    for rig in rigs:
        start = rig.begin if any(rig is one for one in on_device) else rig.open
        for session_id, (length, temperature) in enumerate(zip(lengths, temperatures, strict=True), 1):
            prompt = [(session_id * 7 + 3 * index) % rig.vocab_size for index in range(length)]
            start(session_id, prompt, temperature)
    return [list(rig.streams) for rig in rigs]


def host_round(
    plain: Rig,
    streams: list[Stream],
    other: Rig,
    twins: list[Stream],
    shape: DraftShape,
    source: random.Random,
) -> None:
    """Draft once through the host in each of the two rigs, and commit the same tokens."""
    want, have = plain.propose(streams, shape), other.propose(twins, shape)
    for row, (stream, twin) in enumerate(zip(streams, twins, strict=True)):
        assert_same_trees(have, row, want, row)
        tokens = accepted(want, row, source.randrange(shape.depth + 1), source.randrange(plain.vocab_size))
        plain.commit(stream, tokens)
        other.commit(twin, tokens)


def device_round(
    plain: Rig,
    streams: Sequence[Stream],
    mixed: Rig,
    twins: Sequence[Stream],
    shapes: Sequence[DraftShape | None],
    source: random.Random,
    *,
    ahead: bool,
) -> None:
    """Draft on the device in `mixed` and through the host in `plain`, and commit the same tokens.

    Args:
        plain, streams: The rig that drafts through the host, and its streams.
        mixed, twins: The rig that drafts on the device, and the same streams.
        shapes: The shape of each stream; None for a stream that does not draft.
        source: Chooses the accepted tokens.
        ahead: True if the round is launched before the host has read the previous one.
    """
    if not ahead:
        mixed.read(twins)
    chosen: dict[int, list[int]] = {}
    for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
        group = [row for row, own in enumerate(shapes) if own == shape]
        columns = max(shape.depth + 1, *(twins[row].fresh for row in group)) + source.randrange(2)
        bs = len(group) + source.randrange(3)
        have, seated = mixed.launch([twins[row] for row in group], shape.bounded(), bs, columns)
        assert not seated.refused
        want = plain.propose([streams[row] for row in group], shape)
        assert have.num_nodes.tolist()[len(group) :] == [1] * (bs - len(group)), "idle rows have no drafts"
        for place, row in enumerate(group):
            assert_same_trees(have, place, want, place)
            wanted, bonus = source.randrange(shape.depth + 1), source.randrange(plain.vocab_size)
            chosen[row] = accepted(want, place, wanted, bonus)
    mixed.read(twins)
    for row, (stream, twin) in enumerate(zip(streams, twins, strict=True)):
        drafted = row in chosen
        tokens = chosen[row] if drafted else [source.randrange(plain.vocab_size)]
        plain.commit(stream, tokens)
        mixed.advance(twin, tokens, drafted=drafted)


def check_mixture(plain: Rig, mixed: Rig, shape: DraftShape, rounds: int = 12) -> None:
    """Check that rounds on the device draft the same as rounds through the host.

    In every round, some streams draft, with `shape` or a small shape, and others do not.
    """
    streams, twins = open_streams(plain, mixed, on_device=[mixed])
    source = random.Random(shape.depth * 100 + shape.topk)
    offered = (shape, shape, DraftShape(2, 1, 3), None)
    for _ in range(rounds):
        shapes = [source.choice(offered) for _ in streams]
        device_round(plain, streams, mixed, twins, shapes, source, ahead=source.random() < 0.7)
    device_round(plain, streams, mixed, twins, [shape] * len(streams), source, ahead=True)
    for rig in (plain, mixed):
        rig.drafter.shutdown()
