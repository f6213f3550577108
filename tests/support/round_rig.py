"""A fake target that drives an in-process drafter through the host or in rounds on the device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.services.draft.inproc import InprocDrafter
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.drafter import Commit, Commits, ProposalRequest, ProposalRow, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.resident import ResidentBatch, RoundState
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass
class Stream:
    """A synthetic sequence. The caller chooses its tokens, and its number determines its features.

    Attributes:
        told: Number of committed tokens that the drafter has received in either way.
    """

    session_id: int
    tokens: list[int]
    temperature: float
    seed: int
    told: int = 0
    ended: bool = False

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
    _states: dict[tuple[int, int], RoundState] = field(default_factory=dict)

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
        stream = Stream(session_id, list(prompt), temperature, seed=session_id * 77 + 5)
        self.drafter.open(
            [SequenceOpen(stream.fence(len(prompt) - 1), stream.tokens[:-1], stream.seed, temperature)]
        )
        rows = self.feature_rows(stream, 0, len(prompt) - 1)
        if rows is not None:
            self.drafter.features(session_id, 0, rows)
        self.streams.append(stream)
        stream.told = len(prompt) - 1
        self.commit(stream, [])
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

    def state(self, streams: Sequence[Stream], bs: int, columns: int) -> RoundState:
        """Return a state at a fixed address, with idle rows, as the engine fills it before it enters."""
        if (bs, columns) not in self._states:
            self._states[bs, columns] = RoundState.idle(
                bs, columns, self.feature_size, torch.float32, self.device
            )
        state = self._states[bs, columns]
        state.counts.zero_()
        state.tokens.zero_()
        state.features.fill_(torch.nan)  # values outside the rows must not be read
        for row, stream in enumerate(streams):
            state.committed_lens[row] = len(stream.tokens)
            state.temperature[row] = stream.temperature
            state.seeds[row] = stream.seed
        return state

    def enter(self, streams: Sequence[Stream], shape: DraftShape, state: RoundState) -> ResidentBatch:
        """Start rounds as the engine does: first record them with idle rows. The start must succeed."""
        self.record(self.drafter.rounds_for_capture(shape, state), shape, state)
        rounds = self.drafter.enter([stream.session_id for stream in streams], shape, state)
        assert rounds is not None
        return rounds

    def record(self, rounds: ResidentBatch, shape: DraftShape, state: RoundState) -> DraftBatch:
        """Enqueue one round of drafting."""
        return self.graphs.run((rounds.key, shape, state.bs, state.columns), lambda: rounds.draft(state))

    def advance(self, state: RoundState, row: int, stream: Stream, tokens: Sequence[int]) -> None:
        """Write the state that a round of the engine leaves behind if the engine chooses `tokens`."""
        stream.tokens.extend(tokens)
        count, length = len(tokens), len(stream.tokens)
        state.tokens[row] = 0
        state.tokens[row, :count] = torch.tensor(tokens, dtype=torch.int32)
        state.counts[row] = count
        state.committed_lens[row] = length
        state.features[row] = torch.nan
        rows = self.feature_rows(stream, length - 1 - count, length - 1)
        if rows is not None:
            state.features[row, :count] = rows

    def end(self, state: RoundState, rounds: ResidentBatch, row: int, stream: Stream) -> None:
        """End a sequence while rounds are running."""
        state.counts[row] = 0
        stream.ended = True
        rounds.retire([row])
        self.drafter.close([stream.session_id])


def accepted(trees: DraftBatch, row: int, wanted: int, bonus: int) -> list[int]:
    """Return tokens that a target may choose: up to `wanted` nodes of the first path, then a bonus token."""
    tokens, parents = trees.tokens[row].tolist(), trees.parents[row].tolist()
    at, chosen = 0, []
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


def open_streams(*rigs: Rig) -> list[list[Stream]]:
    """Open the same sequences in all rigs. Some are greedy, some are longer than a round's columns."""
    lengths, temperatures = (2, 9, 30, 4), (0.0, 0.8, 0.0, 1.3)
    for rig in rigs:
        for session_id, (length, temperature) in enumerate(zip(lengths, temperatures, strict=True), 1):
            rig.open(
                session_id,
                [(session_id * 7 + 3 * index) % rig.vocab_size for index in range(length)],
                temperature,
            )
    return [list(rig.streams) for rig in rigs]


def host_round(
    plain: Rig,
    streams: list[Stream],
    mixed: Rig,
    twins: list[Stream],
    shape: DraftShape,
    source: random.Random,
) -> None:
    """Draft once through the host in each of the two rigs, and commit the same tokens."""
    want, have = plain.propose(streams, shape), mixed.propose(twins, shape)
    for row, (stream, twin) in enumerate(zip(streams, twins, strict=True)):
        assert_same_trees(have, row, want, row)
        tokens = accepted(want, row, source.randrange(shape.depth + 1), source.randrange(plain.vocab_size))
        plain.commit(stream, tokens)
        mixed.commit(twin, tokens)


def device_rounds(
    plain: Rig,
    streams: list[Stream],
    mixed: Rig,
    twins: list[Stream],
    shape: DraftShape,
    source: random.Random,
    *,
    columns: int,
    count: int,
) -> None:
    """Draft `count` times on the device in `mixed`. The host learns the result of each round one round late.

    The rig `plain` drafts through the host.
    """
    state = mixed.state(twins, len(twins) + 2, columns)  # two idle rows
    rounds = mixed.enter(twins, shape, state)
    untold: list[list[int]] | None = None
    for _ in range(count):
        assert rounds.reserve([len(twin.tokens) for twin in twins])
        have = mixed.record(rounds, shape, state)
        if untold is not None:
            rounds.committed(untold)
        want = plain.propose(streams, shape)
        assert have.tokens.shape == (state.bs, shape.max_nodes)
        assert have.num_nodes.tolist()[len(twins) :] == [1, 1]
        untold = []
        for row, (stream, twin) in enumerate(zip(streams, twins, strict=True)):
            assert_same_trees(have, row, want, row)
            tokens = accepted(
                want, row, source.randrange(shape.depth + 1), source.randrange(plain.vocab_size)
            )
            plain.commit(stream, tokens)
            mixed.advance(state, row, twin, tokens)
            untold.append(tokens)
    if untold is not None:
        rounds.committed(untold)
    rounds.leave()
    state.features.fill_(torch.nan)  # the engine may reuse it immediately
    for twin in twins:
        twin.told = len(twin.tokens)


def check_mixture(plain: Rig, mixed: Rig, shape: DraftShape) -> None:
    """Check that mixing device rounds and host rounds drafts the same as host rounds alone."""
    streams, twins = open_streams(plain, mixed)
    source = random.Random(shape.depth * 100 + shape.topk)
    for spell in range(4):
        for _ in range(source.randrange(3)):
            host_round(plain, streams, mixed, twins, shape, source)
        columns = shape.depth + 1 + spell % 2
        device_rounds(plain, streams, mixed, twins, shape, source, columns=columns, count=source.randrange(4))
    host_round(plain, streams, mixed, twins, shape, source)
    for rig in (plain, mixed):
        rig.drafter.shutdown()
