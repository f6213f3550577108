"""Growing EAGLE-2's dynamic tree with a recurrent head, level by level, for a batch of sequences at once.

Draft KV of one sequence while its tree grows (S = stable rows, made of true features):

    [0, S)                       prefix: every row of the tree sees all of it
    [S, S + topk)                level 1: the beam below the root
    [S + topk, S + 2 * topk)     level 2: … and so on; scratch, overwritten by the next round

A row of level i sits at rope position S - 1 + i, as all rows of its level. It sees the prefix, its own ancestors and itself. When the next
beam keeps two children of one row, rows change parents: the ancestor masks are re-indexed at every level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.topk_expand import Expansion, select_beam, topk_expand
from outrider.kernels.tree_build import tree_build
from outrider.services.draft.heads.base import RecurrentHead
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.rope import Rotation
from outrider.shared.spec.tree import MASK_WORD_BITS, DraftBatch, mask_words


@dataclass(frozen=True, slots=True)
class Coupling:
    """The noise that the target will sample with, one entry per sequence; see `kernels.philox`.

    Attributes:
        temperature: ``[bs] fp32``; 0 = greedy, no noise.
        seeds: ``[bs] int64`` bit patterns.
        choices: ``[bs] int32``.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True, slots=True)
class GrowBatch:
    """Sequences whose trees are grown together.

    Attributes:
        leases: One per sequence, holding at least ``stable_lens[b] + scratch_rows(depth, topk)`` tokens.
        stable_lens: Rows in the head's KV; committed_len - 1.
        states: ``[bs, hidden]``, of the last stable row of each.
        root_tokens: Last committed token of each.
        depth, topk: Of all trees.
        max_nodes: Per sequence, the root included.
        coupling: Or None when every sequence is greedy.
    """

    leases: Sequence[PageLease]
    stable_lens: Sequence[int]
    states: torch.Tensor
    root_tokens: Sequence[int]
    depth: int
    topk: int
    max_nodes: Sequence[int]
    coupling: Coupling | None = None


def scratch_rows(depth: int, topk: int) -> int:
    """Return how many KV rows the levels of a tree take: every level but the last is run through the head."""
    return max(0, depth - 1) * topk


MAX_CACHED_SHAPES = 256


class TreeGrower:
    """Grows trees with one head over one pool.

    Args:
        head: The head.
        attention: Its attention backend.
        pool: Its KV.
    """

    def __init__(self, head: RecurrentHead, attention: AttentionBackend, pool: KVPool) -> None:
        self._head = head
        self._attention = attention
        self._pool = pool
        self._constants: dict[tuple[int, int, int], _Constants] = {}

    def grow(self, batch: GrowBatch) -> DraftBatch:
        """Return one tree per sequence. Writes scratch rows behind the stable ones."""
        head, bs = self._head, len(batch.leases)
        topk = min(batch.topk, head.vocabulary.size)
        depth = batch.depth
        constants = self._constants_for(bs, depth, topk)
        host = torch.tensor([batch.stable_lens, batch.root_tokens, batch.max_nodes], dtype=torch.int32)
        stable_lens, root_tokens, max_nodes = host.to(head.device)  # each [bs]

        expansion = self._expand(head.logits(batch.states), constants.zeros[:bs], topk, batch, stable_lens, level=0)
        tokens, scores, logprobs = [expansion.token_ids], [expansion.scores], [expansion.logprobs]
        beams: list[torch.Tensor] = []
        beam = _Beam(expansion, batch.states.repeat_interleave(topk, 0), constants)
        if depth > 1:
            levels = self._prepare_levels(batch, stable_lens, depth, topk, constants)
        for level in range(1, depth):
            self._attention.plan(levels.attention_batch(level, beam.ancestors))
            states = head.forward(beam.tokens, beam.states, levels.rotation(level), self._attention, self._pool)
            expansion = self._expand(head.logits(states), beam.scores, topk, batch, stable_lens, level)
            tokens.append(expansion.token_ids.view(bs, -1))
            scores.append(expansion.scores.view(bs, -1))
            logprobs.append(expansion.logprobs.view(bs, -1))
            beams.append(beam.candidates)
            if level < depth - 1:
                beam.advance(expansion, states, level)
        parents = constants.root_parents
        if beams:
            parents = torch.cat([parents, torch.cat(beams, 1).repeat_interleave(topk, 1)], 1)
        tree = tree_build(torch.cat(scores, 1), torch.cat(tokens, 1), parents, root_tokens, max_nodes, max(batch.max_nodes))
        is_draft = tree.candidates >= 0
        drafted = torch.cat(logprobs, 1).gather(1, tree.candidates.clamp(min=0).to(torch.int64))  # [bs, N]
        return DraftBatch(
            tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors, logprobs=torch.where(is_draft, drafted, 0.0)
        )

    def _expand(
        self, logits: torch.Tensor, scores: torch.Tensor, topk: int, batch: GrowBatch, stable_lens: torch.Tensor, level: int
    ) -> Expansion:
        """Return the children of all rows of a level (0: the root)."""
        d2t = self._head.vocabulary.d2t
        coupling = batch.coupling
        if coupling is None:
            return topk_expand(logits, scores, topk, d2t=d2t)
        width = logits.shape[0] // len(batch.leases)
        # The token after a node of depth d has index committed_len + d.
        positions = stable_lens.to(torch.int64) + (1 + level)
        return topk_expand(
            logits,
            scores,
            topk,
            d2t=d2t,
            temperature=coupling.temperature.repeat_interleave(width),
            seeds=coupling.seeds.repeat_interleave(width),
            positions=positions.repeat_interleave(width),
            choices=coupling.choices.repeat_interleave(width),
        )

    def _prepare_levels(self, batch: GrowBatch, stable_lens: torch.Tensor, depth: int, topk: int, constants: _Constants) -> _Levels:
        """Compute once what the levels need of positions and memory."""
        pool, bs = self._pool, len(batch.leases)
        page_table = pool.page_table(batch.leases)
        scratch = pool.slots(page_table, stable_lens, scratch_rows(depth, topk)).view(bs, depth - 1, topk)
        positions = stable_lens + constants.level_offsets  # [depth - 1, bs]: S - 1 + level
        rotation = self._head.rotation(positions.repeat_interleave(topk, 1).view(-1))
        return _Levels(page_table, stable_lens, scratch, rotation, constants.query_start, topk, max(batch.stable_lens))

    def _constants_for(self, bs: int, depth: int, topk: int) -> _Constants:
        key = (bs, depth, topk)
        if key not in self._constants:
            if len(self._constants) >= MAX_CACHED_SHAPES:
                self._constants.clear()
            self._constants[key] = _Constants.make(bs, depth, topk, self._head.device)
        return self._constants[key]


@dataclass(frozen=True, slots=True)
class _Constants:
    """Tensors that depend on the shape of a batch only.

    Attributes:
        bs, topk: The shape.
        zeros: ``[bs] fp32``, scores of the roots.
        root_parents: ``[bs, topk] int32``, -1.
        query_start: ``[bs + 1] int32``.
        first_child: ``[bs, 1] int32``, index of each sequence's first candidate among those of a level.
        level_offsets: ``[depth - 1, 1] int32``, position of a level less the position of level 1.
        self_bits: ``[depth - 1, bs * topk, words] int32``, each row's own scratch column.
    """

    bs: int
    topk: int
    zeros: torch.Tensor
    root_parents: torch.Tensor
    query_start: torch.Tensor
    first_child: torch.Tensor
    level_offsets: torch.Tensor
    self_bits: torch.Tensor

    @classmethod
    def make(cls, bs: int, depth: int, topk: int, device: torch.device) -> _Constants:
        levels = max(1, depth - 1)
        words = mask_words(levels * topk)
        columns = torch.arange(levels * topk)
        one = torch.ones((), dtype=torch.int32)
        bits = torch.zeros(levels * topk, words, dtype=torch.int32)
        bits[columns, columns // MASK_WORD_BITS] = one << (columns % MASK_WORD_BITS).to(torch.int32)
        self_bits = bits.view(levels, 1, topk, words).expand(levels, bs, topk, words).reshape(levels, bs * topk, words)
        return cls(
            bs,
            topk,
            torch.zeros(bs, device=device),
            torch.full((bs, topk), -1, dtype=torch.int32, device=device),
            (torch.arange(bs + 1, dtype=torch.int32) * topk).to(device),
            (torch.arange(bs, dtype=torch.int32) * topk * topk).view(bs, 1).to(device),
            torch.arange(levels, dtype=torch.int32).view(levels, 1).to(device),
            self_bits.contiguous().to(device),
        )


@dataclass(frozen=True, slots=True)
class _Levels:
    """What the levels of one tree need of positions and memory, computed once per round."""

    page_table: torch.Tensor
    stable_lens: torch.Tensor
    scratch: torch.Tensor
    """``[bs, depth - 1, topk] int64`` slots."""
    rotations: Rotation
    query_start: torch.Tensor
    topk: int
    max_stable_len: int

    def attention_batch(self, level: int, ancestors: torch.Tensor) -> AttentionBatch:
        """Return what the rows of a level (from 1) see."""
        written = level * self.topk
        return AttentionBatch(
            page_table=self.page_table,
            prefix_lens=self.stable_lens,
            kv_lens=self.stable_lens + written,
            query_start=self.query_start,
            ancestors=ancestors,
            slots=self.scratch[:, level - 1].reshape(-1),
            max_query_len=self.topk,
            max_kv_len=self.max_stable_len + written,
        )

    def rotation(self, level: int) -> Rotation:
        """Return the angles of a level's rows."""
        rows = self.scratch.shape[0] * self.topk
        window = slice((level - 1) * rows, level * rows)
        return Rotation(self.rotations.cos[window], self.rotations.sin[window])


class _Beam:
    """The rows of the level that runs next, all sequences after one another.

    Attributes:
        tokens: ``[rows] int32``.
        scores: ``[rows] fp32``, cumulative.
        states: ``[rows, hidden]`` of the rows' parents: their features.
        ancestors: ``[rows, words] int32`` over scratch columns, the row itself included.
        candidates: ``[bs, topk] int32``, which candidate each row was.
    """

    def __init__(self, children: Expansion, states: torch.Tensor, constants: _Constants) -> None:
        topk = constants.topk
        self._constants = constants
        self.tokens = children.token_ids.view(-1)
        self.scores = children.scores.view(-1)
        self.states = states
        self.ancestors = constants.self_bits[0]
        self.candidates = torch.arange(topk, dtype=torch.int32, device=states.device).expand(constants.bs, topk)

    def advance(self, children: Expansion, states: torch.Tensor, level: int) -> None:
        """Move to the best children of the rows of `level`; the new rows take over the masks of their own parents."""
        bs, topk = self._constants.bs, self._constants.topk
        chosen = select_beam(children.scores.view(bs, topk * topk), topk)  # [bs, topk] int32
        child = (chosen + self._constants.first_child).view(-1)  # among the children of all sequences
        parent_row = child // topk
        self.tokens = children.token_ids.view(-1).index_select(0, child)
        self.scores = children.scores.view(-1).index_select(0, child)
        self.states = states.index_select(0, parent_row)
        self.ancestors = self.ancestors.index_select(0, parent_row).bitwise_or_(self._constants.self_bits[level])
        self.candidates = chosen + (topk + (level - 1) * topk * topk)
