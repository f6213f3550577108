"""Growing EAGLE-2's dynamic tree with a model, level by level, for a batch of sequences at once.

Draft KV of one sequence while its tree grows (S = stable rows, made of what is committed):

    [0, S)                       prefix: every row of the tree sees all of it
    [S, S + topk)                level 1: the beam below the root
    [S + topk, S + 2 * topk)     level 2: … and so on; scratch, overwritten by the next round

A row of level i sits at rope position S - 1 + i, as all rows of its level. It sees the prefix, its own ancestors and itself. When the next
beam keeps two children of one row, rows change parents: the ancestor masks are re-indexed at every level.

A model of several stages (chained MTP modules) has K/V planes for each. A stage that lags b rows behind has the prefix [0, S - b), the
levels lie right behind that, and their rows sit at S - 1 + i - b; see `growth.Stage`. In a sequence of S < b rows those of the first b - S
levels would sit before the text: nobody sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.topk_expand import Expansion, select_beam, topk_expand
from outrider.kernels.tree_build import tree_build
from outrider.services.draft.growth.growing_model import GrowingModel, LevelPass, PassKey, passes_of
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
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
        stable_lens: Rows in the model's KV.
        committed_lens: Committed tokens, the root included.
        states: ``[bs, hidden]``, of the last stable row of each.
        root_tokens: Last committed token of each.
        depth, topk: Of all trees.
        max_nodes: Per sequence, the root included.
        coupling: Or None when every sequence is greedy.
        stage_states: ``[bs, stages, hidden]``, of the last stable row of each stage; of models with more than two.
    """

    leases: Sequence[PageLease]
    stable_lens: Sequence[int]
    committed_lens: Sequence[int]
    states: torch.Tensor
    root_tokens: Sequence[int]
    depth: int
    topk: int
    max_nodes: Sequence[int]
    coupling: Coupling | None = None
    stage_states: torch.Tensor | None = None


def scratch_rows(depth: int, topk: int) -> int:
    """Return how many KV rows the levels of a tree take: every level but the last is run through the model."""
    return max(0, depth - 1) * topk


MAX_CACHED_SHAPES = 256


class HostGrower:
    """Grows trees with one model over one pool.

    Args:
        model: The model.
        attention: Its attention backend.
        pool: Its KV.
    """

    def __init__(self, model: GrowingModel, attention: AttentionBackend, pool: KVPool) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._constants: dict[tuple[int, int, int], _Constants] = {}

    def grow(self, batch: GrowBatch) -> DraftBatch:
        """Return one tree per sequence. Writes scratch rows behind the stable ones."""
        model, bs = self._model, len(batch.leases)
        topk = min(batch.topk, model.vocabulary.size)
        depth = batch.depth
        constants = self._constants_for(bs, depth, topk)
        host = torch.tensor(
            [batch.stable_lens, batch.root_tokens, batch.max_nodes, batch.committed_lens], dtype=torch.int32
        )
        stable_lens, root_tokens, max_nodes, committed_lens = host.to(model.device)  # each [bs]

        expansion = self._expand(
            model.logits(batch.states), constants.zeros[:bs], topk, batch, committed_lens, level=0
        )
        tokens, scores, logprobs = [expansion.token_ids], [expansion.scores], [expansion.logprobs]
        beams: list[torch.Tensor] = []
        beam = _Beam(expansion, batch.states.repeat_interleave(topk, 0), constants)
        if depth > 1:
            levels = self._prepare_levels(batch, stable_lens, topk, constants)
        history: list[_LevelRows] = []
        made: list[torch.Tensor] = []  # by the stage at work, level by level
        for level in range(1, depth):
            *missed, own = constants.passes[level - 1]
            if missed:
                assert batch.stage_states is not None, (
                    "a model of more than two stages needs the states of all"
                )
                first = batch.stage_states[:, missed[0].stage.behind - 1].repeat_interleave(topk, 0)
                before = [
                    first,
                    *(
                        out.index_select(0, rows.parents)
                        for out, rows in zip(made, history[1:], strict=False)
                    ),
                ]
                made = [
                    self._run(levels, key, rows, states)
                    for key, rows, states in zip(missed, history, before, strict=True)
                ]
            rows = beam.rows()
            states = self._run(levels, own, rows, beam.states)
            if constants.catches_up:
                history.append(rows)
                made.append(states)
            expansion = self._expand(model.logits(states), beam.scores, topk, batch, committed_lens, level)
            tokens.append(expansion.token_ids.view(bs, -1))
            scores.append(expansion.scores.view(bs, -1))
            logprobs.append(expansion.logprobs.view(bs, -1))
            beams.append(beam.candidates)
            if level < depth - 1:
                beam.advance(expansion, states, level)
        parents = constants.root_parents
        if beams:
            parents = torch.cat([parents, torch.cat(beams, 1).repeat_interleave(topk, 1)], 1)
        tree = tree_build(
            torch.cat(scores, 1), torch.cat(tokens, 1), parents, root_tokens, max_nodes, max(batch.max_nodes)
        )
        is_draft = tree.candidates >= 0
        drafted = torch.cat(logprobs, 1).gather(1, tree.candidates.clamp(min=0).to(torch.int64))  # [bs, N]
        return DraftBatch(
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.num_nodes,
            tree.ancestors,
            logprobs=torch.where(is_draft, drafted, 0.0),
        )

    def _run(self, levels: _Levels, key: PassKey, rows: _LevelRows, states: torch.Tensor) -> torch.Tensor:
        """Return the states that a stage makes of the rows of a level."""
        self._attention.plan(levels.attention_batch(key, rows.ancestors))
        return levels.passes[key](rows.tokens, states)

    def _expand(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        topk: int,
        batch: GrowBatch,
        committed_lens: torch.Tensor,
        level: int,
    ) -> Expansion:
        """Return the children of all rows of a level (0: the root)."""
        d2t = self._model.vocabulary.d2t
        coupling = batch.coupling
        if coupling is None:
            return topk_expand(logits, scores, topk, d2t=d2t)
        width = logits.shape[0] // len(batch.leases)
        # The token after a node of depth d has index committed_len + d.
        positions = committed_lens.to(torch.int64) + level
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

    def _prepare_levels(
        self, batch: GrowBatch, stable_lens: torch.Tensor, topk: int, constants: _Constants
    ) -> _Levels:
        """Compute once what the levels need of positions and memory."""
        pool, bs = self._pool, len(batch.leases)
        page_table = pool.page_table(batch.leases)
        prefixes: dict[int, torch.Tensor] = {}
        slots: dict[int, torch.Tensor] = {}
        hidden: dict[int, torch.Tensor] = {}
        count = len(constants.passes)
        for behind in constants.lags:
            prefixes[behind] = stable_lens if behind == 0 else (stable_lens - behind).clamp_(min=0)
            slots[behind] = pool.slots(page_table, prefixes[behind], count * topk).view(bs, count, topk)
            if min(batch.stable_lens) < behind:
                hidden[behind] = constants.columns_from(
                    [max(0, behind - stable) * topk for stable in batch.stable_lens]
                )
        positions = (stable_lens + constants.offsets).repeat_interleave(topk, 1)  # [passes, bs * topk]
        if constants.catches_up:
            positions = positions.clamp_(min=0)
        keys = [key for passes in constants.passes for key in passes]
        passes = self._model.level_passes(positions, [key.stage for key in keys], self._attention, pool)
        return _Levels(
            page_table,
            prefixes,
            slots,
            hidden,
            dict(zip(keys, passes, strict=True)),
            constants,
            max(batch.stable_lens),
        )

    def _constants_for(self, bs: int, depth: int, topk: int) -> _Constants:
        key = (bs, depth, topk)
        if key not in self._constants:
            if len(self._constants) >= MAX_CACHED_SHAPES:
                self._constants.clear()
            self._constants[key] = _Constants.make(bs, depth, topk, self._model)
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
        self_bits: ``[depth - 1, bs * topk, words] int32``, each row's own bit, of each level.
        passes: Of each level from 1.
        offsets: ``[passes, 1] int32``, rope position of each pass's rows less S.
        lags: How far the stages lag behind, each once.
        catches_up: Some stage runs levels before the one at which it takes over.
    """

    bs: int
    topk: int
    zeros: torch.Tensor
    root_parents: torch.Tensor
    query_start: torch.Tensor
    first_child: torch.Tensor
    self_bits: torch.Tensor
    passes: Sequence[Sequence[PassKey]]
    offsets: torch.Tensor
    lags: Sequence[int]
    catches_up: bool

    @classmethod
    def make(cls, bs: int, depth: int, topk: int, model: GrowingModel) -> _Constants:
        device = model.device
        levels = max(1, depth - 1)
        passes = passes_of(model, levels)
        keys = [key for of_level in passes for key in of_level]
        words = mask_words(levels * topk)
        columns = torch.arange(levels * topk)
        one = torch.ones((), dtype=torch.int32)
        bits = torch.zeros(levels * topk, words, dtype=torch.int32)
        bits[columns, columns // MASK_WORD_BITS] = one << (columns % MASK_WORD_BITS).to(torch.int32)
        self_bits = (
            bits.view(levels, 1, topk, words)
            .expand(levels, bs, topk, words)
            .reshape(levels, bs * topk, words)
        )
        return cls(
            bs,
            topk,
            torch.zeros(bs, device=device),
            torch.full((bs, topk), -1, dtype=torch.int32, device=device),
            (torch.arange(bs + 1, dtype=torch.int32) * topk).to(device),
            (torch.arange(bs, dtype=torch.int32) * topk * topk).view(bs, 1).to(device),
            self_bits.contiguous().to(device),
            passes,
            torch.tensor([key.level - 1 - key.stage.behind for key in keys], dtype=torch.int32)
            .view(-1, 1)
            .to(device),
            sorted({key.stage.behind for key in keys}),
            len(keys) > levels,
        )

    def columns_from(self, firsts: Sequence[int]) -> torch.Tensor:
        """Return masks ``[bs * topk, words] int32`` of the scratch columns from a first one on, one for each sequence."""
        words = self.self_bits.shape[2]
        bits = [
            [(-1 << max(0, first - word * MASK_WORD_BITS)) & 0xFFFFFFFF for word in range(words)]
            for first in firsts
        ]
        masks = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
        return masks.repeat_interleave(self.topk, 0).to(self.self_bits.device)


@dataclass(frozen=True, slots=True)
class _Levels:
    """What the levels of one tree need of positions and memory, computed once per round.

    Attributes:
        page_table: ``[bs, pages] int32``.
        prefixes: Lag of a stage → ``[bs] int32``, its stable rows.
        slots: Lag of a stage → ``[bs, depth - 1, topk] int64``, where the K/V of each level goes.
        hidden: Lag of a stage → ``[bs * topk, words] int32``, columns that are not before the text; where some are.
        passes: Run the levels.
        constants: Of the shape.
        max_stable_len: Of all sequences.
    """

    page_table: torch.Tensor
    prefixes: Mapping[int, torch.Tensor]
    slots: Mapping[int, torch.Tensor]
    hidden: Mapping[int, torch.Tensor]
    passes: Mapping[PassKey, LevelPass]
    constants: _Constants
    max_stable_len: int

    def attention_batch(self, key: PassKey, ancestors: torch.Tensor) -> AttentionBatch:
        """Return what the rows of a pass see; `ancestors` are those of its level."""
        behind, topk = key.stage.behind, self.constants.topk
        prefix, written = self.prefixes[behind], topk * key.level
        if behind in self.hidden:
            # The row itself stays: one that sees nothing would be NaN, and spoil those that do not see it.
            ancestors = ancestors & self.hidden[behind] | self.constants.self_bits[key.level - 1]
        return AttentionBatch(
            page_table=self.page_table,
            prefix_lens=prefix,
            kv_lens=prefix + written,
            query_start=self.constants.query_start,
            ancestors=ancestors,
            slots=self.slots[behind][:, key.level - 1].flatten().contiguous(),
            max_query_len=topk,
            max_kv_len=self.max_stable_len + written,
        )


@dataclass(frozen=True, slots=True)
class _LevelRows:
    """The rows of one level, all sequences after one another.

    Attributes:
        tokens: ``[rows] int32``.
        ancestors: ``[rows, words] int32`` over the scratch columns, the row itself included.
        parents: ``[rows]``, indices among the rows of the level before; without meaning at level 1.
    """

    tokens: torch.Tensor
    ancestors: torch.Tensor
    parents: torch.Tensor


class _Beam:
    """The rows of the level that runs next, all sequences after one another.

    Attributes:
        tokens: ``[rows] int32``.
        scores: ``[rows] fp32``, cumulative.
        states: ``[rows, hidden]`` of the rows' parents: their features.
        ancestors, parents: See `_LevelRows`.
        candidates: ``[bs, topk] int32``, which candidate each row was.
    """

    def __init__(self, children: Expansion, states: torch.Tensor, constants: _Constants) -> None:
        topk = constants.topk
        self._constants = constants
        self.tokens = children.token_ids.view(-1)
        self.scores = children.scores.view(-1)
        self.states = states
        self.ancestors = constants.self_bits[0]
        self.parents = children.token_ids.view(-1)
        self.candidates = torch.arange(topk, dtype=torch.int32, device=states.device).expand(
            constants.bs, topk
        )

    def rows(self) -> _LevelRows:
        """Return the rows apart from what is known of them."""
        return _LevelRows(self.tokens, self.ancestors, self.parents)

    def advance(self, children: Expansion, states: torch.Tensor, level: int) -> None:
        """Move to the best children of the rows of `level`; the new rows take over the masks of their own parents."""
        bs, topk = self._constants.bs, self._constants.topk
        chosen = select_beam(children.scores.view(bs, topk * topk), topk)  # [bs, topk] int32
        child = (chosen + self._constants.first_child).view(-1)  # among the children of all sequences
        self.parents = child // topk
        self.tokens = children.token_ids.view(-1).index_select(0, child)
        self.scores = children.scores.view(-1).index_select(0, child)
        self.states = states.index_select(0, self.parents)
        self.ancestors = self.ancestors.index_select(0, self.parents).bitwise_or_(
            self._constants.self_bits[level]
        )
        self.candidates = chosen + (topk + (level - 1) * topk * topk)
