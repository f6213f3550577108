"""A made-up target that drives an in-process drafter both ways: by the host, and by rounds that stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.services.draft.inproc import InprocDrafter
from outrider.shared.spec.device import DeviceRounds, RoundState
from outrider.shared.spec.drafter import Commit, ProposalRequest, ProposalRow, RoundResult, SequenceOpen
from outrider.shared.spec.fence import FNV_OFFSET, Fence, extend_prefix_hash
from outrider.shared.spec.tree import DraftBatch, DraftShape


@dataclass
class Stream:
    """One made-up sequence: its text and features are functions of its number, its choices are the caller's."""

    session_id: int
    tokens: list[int]
    temperature: float
    seed: int
    told: int = 0
    """Committed tokens that the drafter knows of, by either way."""
    ended: bool = False

    def fence(self, length: int | None = None) -> Fence:
        known = self.tokens[:length]
        return Fence(self.session_id, 1, len(known), extend_prefix_hash(FNV_OFFSET, known))


@dataclass
class Rig:
    """A drafter and the sequences that it follows.

    Args:
        drafter: The drafter.
        feature_size: Width of the made-up features; 0: none.
        device, dtype: Of the features.
    """

    drafter: InprocDrafter
    feature_size: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    streams: list[Stream] = field(default_factory=list)
    _round: int = 0

    def feature_rows(self, stream: Stream, begin: int, end: int) -> torch.Tensor | None:
        if not self.feature_size:
            return None
        rows = [
            torch.randn(self.feature_size, generator=torch.Generator().manual_seed(stream.session_id * 10_000 + position))
            for position in range(begin, end)
        ]
        return torch.stack(rows).to(self.device, self.dtype)

    def open(self, session_id: int, prompt: Sequence[int], temperature: float) -> Stream:
        """Follow a sequence from its prompt and the first token after it."""
        stream = Stream(session_id, list(prompt), temperature, seed=session_id * 77 + 5)
        self.drafter.open([SequenceOpen(stream.fence(len(prompt) - 1), stream.tokens[:-1], stream.seed, temperature)])
        rows = self.feature_rows(stream, 0, len(prompt) - 1)
        if rows is not None:
            self.drafter.features(session_id, 0, rows)
        self.streams.append(stream)
        stream.told = len(prompt) - 1
        self.commit(stream, [])
        return stream

    def commit(self, stream: Stream, tokens: Sequence[int]) -> None:
        """Tell the drafter what was chosen since it was told last, the host's way."""
        stream.tokens.extend(tokens)
        base = stream.told
        rows = self.feature_rows(stream, base - 1, len(stream.tokens) - 1)
        self.drafter.commit(RoundResult(self._round, [Commit(stream.fence(), base, stream.tokens[base:], rows)]))
        stream.told = len(stream.tokens)

    def propose(self, streams: Sequence[Stream], shape: DraftShape) -> DraftBatch:
        self._round += 1
        rows = [ProposalRow(stream.fence(), stream.tokens[-1], shape) for stream in streams]
        return self.drafter.propose(ProposalRequest(self._round, rows, None))

    def state(self, streams: Sequence[Stream], bs: int, columns: int) -> RoundState:
        """Return what the engine fills before it enters."""
        state = RoundState.idle(bs, columns, self.feature_size, self.dtype, self.device)
        state.features.fill_(torch.nan)  # nobody may read what no row holds
        for row, stream in enumerate(streams):
            state.committed_lens[row] = len(stream.tokens)
            state.temperature[row] = stream.temperature
            state.seeds[row] = stream.seed
        return state

    def advance(self, state: RoundState, row: int, stream: Stream, tokens: Sequence[int]) -> None:
        """Leave in the state what a round of the engine leaves: `tokens` were chosen."""
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

    def end(self, state: RoundState, rounds: DeviceRounds, row: int, stream: Stream) -> None:
        """End a sequence within rounds."""
        state.counts[row] = 0
        stream.ended = True
        rounds.retire([row])
        self.drafter.close([stream.session_id])


def accepted(trees: DraftBatch, row: int, wanted: int, bonus: int) -> list[int]:
    """Return what a target may choose: down the first path of the tree for at most `wanted` nodes, then another token."""
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
        assert getattr(have, name)[row, :nodes].tolist() == getattr(want, name)[wanted_row, :nodes].tolist(), name
    words = min(have.ancestors.shape[2], want.ancestors.shape[2])
    assert have.ancestors[row, :nodes, :words].tolist() == want.ancestors[wanted_row, :nodes, :words].tolist()
    assert have.logprobs is not None
    assert want.logprobs is not None
    torch.testing.assert_close(have.logprobs[row, :nodes].cpu(), want.logprobs[wanted_row, :nodes].cpu(), atol=1e-3, rtol=1e-3)
