"""Grows dynamic draft trees (EAGLE-2, arXiv 2406.16858, section 4) level by level, for a batch of sequences.

The host launches every level. `draft_round` computes the same trees as one CUDA graph.

Draft KV of one sequence while its tree grows (S = stable rows, computed from committed tokens):

    [0, S)                       prefix: every row of the tree sees all of it
    [S, S + topk)                level 1: the beam below the root
    [S + topk, S + 2 * topk)     level 2, and so on: scratch rows, overwritten by the next round

All rows of level i have rope position S - 1 + i. A row sees the prefix, its own ancestors and itself. A beam
may keep two children of one row and none of another, so the ancestor masks are re-indexed at every level.

A model with several stages (chained MTP modules) has separate K/V planes for each stage. A stage that lags b
rows behind has the prefix [0, S - b). The levels of that stage follow directly after this prefix, at rope
positions S - 1 + i - b; see `growing_model.Stage`. If a sequence has S < b rows, the first b - S levels of
the stage would lie before position 0. Those rows are masked out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.topk_expand import Expansion, topk_expand
from outrider.kernels.tree_build import tree_build
from outrider.services.draft.growth.growing_model import GrowingModel, PassKey
from outrider.services.draft.growth.tree_levels import LevelRows, Levels, ShapeConstants, TreeBeam
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pages import PageLease
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import DraftBatch


@dataclass(frozen=True, slots=True)
class Coupling:
    """Parameters of the noise with which the target will sample each sequence; see `kernels.philox`.

    The draft ranks its candidates with the same noise, so that it proposes the tokens the target will sample.

    Attributes:
        temperature: ``[bs] fp32``; 0 means greedy, without noise.
        seeds: ``[bs] int64``, the bit patterns of the requests' seeds.
        choices: ``[bs] int32``, index among the n choices of a request.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True, slots=True)
class GrowBatch:
    """Sequences whose trees are grown together.

    Attributes:
        leases: KV pages of each sequence, for at least ``stable_lens[b] + scratch_rows(depth, topk)`` tokens.
        stable_lens: Number of rows of each sequence in the model's KV.
        committed_lens: Number of committed tokens of each sequence, the root included.
        states: ``[bs, hidden]``, the state of each sequence's last stable row.
        root_tokens: Last committed token of each sequence.
        depth: Levels of every tree below its root.
        topk: Children per node, and nodes per level that are expanded.
        max_nodes: Maximum number of nodes per sequence, the root included.
        coupling: Noise of the target, or None if every sequence is greedy.
        stage_states: ``[bs, stages, hidden]``, the state of the last stable row of each stage. Set only for
            models with more than two stages.
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
    """Return the number of scratch rows of one tree in the KV.

    The model does not run the last level of the tree.
    """
    return max(0, depth - 1) * topk


MAX_CACHED_SHAPES = 256
"""Number of shapes whose constants are kept."""


class HostGrower:
    """Grows trees with one model over one KV pool.

    Args:
        model: The draft model.
        attention: Attention backend of the model.
        pool: KV pool of the model.
    """

    def __init__(self, model: GrowingModel, attention: AttentionBackend, pool: KVPool) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._constants: dict[tuple[int, int, int], ShapeConstants] = {}

    def grow(self, batch: GrowBatch) -> DraftBatch:
        """Grow and return one tree per sequence. Writes scratch rows after the stable rows."""
        model, bs = self._model, len(batch.leases)
        topk = min(batch.topk, model.vocabulary.size)
        depth = batch.depth
        constants = self._constants_for(bs, depth, topk)
        host = torch.tensor(
            [batch.stable_lens, batch.root_tokens, batch.max_nodes, batch.committed_lens], dtype=torch.int32
        )
        stable_lens, root_tokens, max_nodes, committed_lens = host.to(model.device)  # each [bs]

        # 1. Expand the roots: their children are level 0's candidates and the first beam.
        expansion = self._expand(
            model.logits(batch.states), constants.zeros[:bs], topk, batch, committed_lens, level=0
        )
        tokens, scores, logprobs = [expansion.token_ids], [expansion.scores], [expansion.logprobs]
        beams: list[torch.Tensor] = []
        beam = TreeBeam(expansion, batch.states.repeat_interleave(topk, 0), constants)
        if depth > 1:
            levels = self._prepare_levels(batch, stable_lens, topk, constants)
        history: list[LevelRows] = []
        made: list[torch.Tensor] = []  # states computed by the current stage, level by level
        for level in range(1, depth):
            *missed, own = constants.passes[level - 1]
            # 2. If another stage takes over, run that stage over the earlier levels first, to fill its K/V.
            # Its input features are the previous stage's states of the rows' parents.
            if missed:
                assert batch.stage_states is not None, (
                    "a model with more than two stages needs the states of every stage"
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
            # 3. Run the model over the beam, and expand its rows.
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
            # 4. Choose the best children as the next beam. The last level's children are not run.
            if level < depth - 1:
                beam.advance(expansion, states, level)
        # 5. Keep the best candidates of all levels, and lay them out as trees.
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

    def _run(self, levels: Levels, key: PassKey, rows: LevelRows, states: torch.Tensor) -> torch.Tensor:
        """Run one stage over the rows of a level, and return their states."""
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
        """Return the children of all rows of a level. Level 0 is the root."""
        d2t = self._model.vocabulary.d2t
        coupling = batch.coupling
        if coupling is None:
            return topk_expand(logits, scores, topk, d2t=d2t)
        width = logits.shape[0] // len(batch.leases)
        # The token that follows a node of depth d has index committed_len + d, which selects its noise.
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
        self, batch: GrowBatch, stable_lens: torch.Tensor, topk: int, constants: ShapeConstants
    ) -> Levels:
        """Compute the rope positions, KV slots and masks of all levels together."""
        pool, bs = self._pool, len(batch.leases)
        page_table = pool.page_table(batch.leases)
        prefixes: dict[int, torch.Tensor] = {}
        slots: dict[int, torch.Tensor] = {}
        visible: dict[int, torch.Tensor] = {}
        count = len(constants.passes)
        for behind in constants.lags:
            prefixes[behind] = stable_lens if behind == 0 else (stable_lens - behind).clamp_(min=0)
            slots[behind] = pool.slots(page_table, prefixes[behind], count * topk).view(bs, count, topk)
            if min(batch.stable_lens) < behind:
                visible[behind] = constants.columns_from(
                    [max(0, behind - stable) * topk for stable in batch.stable_lens]
                )
        positions = (stable_lens + constants.offsets).repeat_interleave(topk, 1)  # [passes, bs * topk]
        if constants.catches_up:
            positions = positions.clamp_(min=0)
        keys = [key for passes in constants.passes for key in passes]
        passes = self._model.level_passes(positions, [key.stage for key in keys], self._attention, pool)
        return Levels(
            page_table,
            prefixes,
            slots,
            visible,
            dict(zip(keys, passes, strict=True)),
            constants,
            max(batch.stable_lens),
        )

    def _constants_for(self, bs: int, depth: int, topk: int) -> ShapeConstants:
        key = (bs, depth, topk)
        if key not in self._constants:
            if len(self._constants) >= MAX_CACHED_SHAPES:
                self._constants.clear()
            self._constants[key] = ShapeConstants.make(bs, depth, topk, self._model)
        return self._constants[key]
