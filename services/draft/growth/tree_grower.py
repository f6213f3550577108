"""Extends sequences and grows dynamic draft trees (EAGLE-2, arXiv 2406.16858, section 4), level by level.

A round needs no value from the host while it runs, so it can be one CUDA graph. On a CPU, the same code runs
without a graph. To extend a sequence means to compute the draft's K/V for its new tokens. Every sequence is
extended by R rows, of which only the last `counts` rows are real. Rows of idle sequences read and write no
KV.

Rows that are computed from committed tokens are *stable*. A sequence with S stable rows has these KV slots at
the draft while its tree grows:

    [0, S)                       prefix: the stable rows, which every row of the tree sees
    [S, S + topk)                level 1: the beam below the root
    [S + topk, S + 2 * topk)     level 2, and so on: scratch rows, overwritten by the next round

The root is the last committed token. All rows of level i have rope position S - 1 + i. A row sees the prefix,
its own ancestors and itself. The *beam* consists of the rows that are kept at a level. One row may have
several children in the beam, and another row none. The ancestor masks are therefore re-indexed at every
level. `stages` explains the differences for models with several stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.round_plan import RowPlan, round_plan
from outrider.kernels.topk_expand import Beam, Candidates, Noise, expand_level
from outrider.kernels.tree_build import tree_build
from outrider.services.draft.growth.draft_model import DraftModel, DraftPass
from outrider.services.draft.growth.recurrent_head import ONLY_KEYS, Ends
from outrider.services.draft.growth.stages import (
    HiddenLevels,
    PassKey,
    StageStates,
    after_last,
    fresh_slots,
    passes_of,
)
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import DraftBatch, DraftShape, mask_words


@dataclass(frozen=True, slots=True)
class GrowthSize:
    """The sizes of one drafting pass, fixed by the host.

    Rounds with equal sizes and equal tensor addresses share one CUDA graph.

    Attributes:
        bs: Number of sequences, including idle sequences.
        rows: R, the largest number of rows by which a sequence is extended.
        depth, topk: Depth and level width of the trees.
        nodes: Number of columns in the tensors of the trees, one column per node.
    """

    bs: int
    rows: int
    depth: int
    topk: int
    nodes: int

    @classmethod
    def of(cls, bs: int, shape: DraftShape) -> GrowthSize:
        """Return the size of rounds that follow a round with trees of the same shape."""
        shape = shape.bounded()
        return cls(bs, shape.columns, shape.depth, shape.topk, shape.max_nodes)


def scratch_rows(depth: int, topk: int) -> int:
    """Return the number of scratch rows that one growing tree occupies in the draft's KV.

    The last level needs no rows, because the draft model does not run on it.
    """
    return max(0, depth - 1) * topk


@dataclass(frozen=True, slots=True)
class GrowthInputs:
    """Inputs of one drafting pass, on the device.

    Attributes:
        committed_lens: ``[bs] int32``, number of committed tokens, including the root.
        counts: ``[bs] int32``, number of fresh tokens: 1 to R, or 0 if the sequence is idle. The fresh tokens
            are the newest committed tokens, by which the round extends the sequence.
        tokens: ``[bs, columns] int32``, the fresh tokens. The root is the last of them.
        features: ``[bs, columns, width]``, one feature per fresh token.
        max_nodes: ``[bs] int32``, node limit of each tree.
        page_table: ``[bs, pages] int32``, the pages of each sequence in the draft's KV pool.
        places: ``[bs] int32``, the place of each sequence's `StageStates`.
        temperature, seeds, choices: ``[bs]``, fp32, int64 and int32 respectively. They determine the target's
            sampling noise.
    """

    committed_lens: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    features: torch.Tensor
    max_nodes: torch.Tensor
    page_table: torch.Tensor
    places: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Outputs of one drafting pass, on the device.

    Attributes:
        trees: The trees, ``[bs, nodes]``. The tree of an idle sequence has one node.
        states: ``[bs, hidden]``, the states of the last stable rows, from which the trees grew.
    """

    trees: DraftBatch
    states: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Layout:
    """The rows of one round.

    Attributes:
        topk: Width of the levels, at most the size of the vocabulary.
        plans: For each stage, the plan of its rows.
        levels: The passes of each level, from level 1 on.
        passes: The model's pass for each key.
        noise: The target's sampling noise for these rows.
    """

    topk: int
    plans: Sequence[RowPlan]
    levels: Sequence[Sequence[PassKey]]
    passes: Mapping[PassKey, DraftPass]
    noise: Noise


class TreeGrower:
    """Extends sequences and grows draft trees with one draft model over one KV pool.

    Args:
        model: The draft model.
        attention: Attention backend of the model.
        pool: KV pool of the model.

    Attributes:
        stage_states: The states that the stages of the model need from earlier rounds. None if the model has
            one stage.
    """

    def __init__(self, model: DraftModel, attention: AttentionBackend, pool: KVPool) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self.stage_states = StageStates(model, pool) if model.stages > 1 else None
        self._starts: dict[tuple[int, int], torch.Tensor] = {}
        self._hidden: dict[tuple[int, int, int], HiddenLevels] = {}

    def draft(self, inputs: GrowthInputs, size: GrowthSize) -> GrownTrees:
        """Enqueue one round: extend the sequences by their fresh tokens, then grow their trees.

        In the KV slots of a sequence, the order is: rows from earlier rounds, rows of the fresh tokens, rows
        of the tree's levels.
        """
        layout = self._lay_out(inputs, size, extends=True)
        return self._grow(inputs, size, layout, self._extend(inputs, size, layout))

    def grow(self, inputs: GrowthInputs, size: GrowthSize, roots: torch.Tensor) -> GrownTrees:
        """Enqueue the growth of trees for sequences that have been extended already.

        Args:
            inputs: Inputs in which each sequence has one fresh token, its root. The features are not read.
            size: Sizes of the round. ``rows`` must be 1.
            roots: ``[bs, hidden]``, the state of each sequence's last stable row in stage 0.
        """
        return self._grow(inputs, size, self._lay_out(inputs, size, extends=False), roots)

    def _lay_out(self, inputs: GrowthInputs, size: GrowthSize, *, extends: bool) -> _Layout:
        model, bs = self._model, size.bs
        topk = min(size.topk, model.vocabulary.size)
        plans = [
            round_plan(
                inputs.committed_lens,
                inputs.counts,
                inputs.tokens,
                inputs.max_nodes,
                inputs.page_table,
                rows=size.rows,
                depth=size.depth,
                topk=topk,
                page_size=self._pool.page_size,
                lead=model.lead,
                behind=stage,
            )
            for stage in range(model.stages)
        ]
        levels = passes_of(model, size.depth - 1)
        keys = [key for level in levels for key in level]
        if extends:
            keys = [PassKey(0, stage) for stage in range(model.stages)] + keys
        noise = Noise(inputs.temperature, inputs.seeds, inputs.committed_lens, inputs.choices)
        if not keys:
            return _Layout(topk, plans, levels, {}, noise)
        # Put all rows in the order of the passes. The rows of a model with one stage are in this order
        # already.
        first, width = bs * size.rows, bs * topk
        positions = plans[0].positions[0 if extends else first :]
        if model.stages > 1:
            starts = [0 if key.level == 0 else first + (key.level - 1) * width for key in keys]
            positions = torch.cat(
                [
                    plans[key.stage].positions[start : start + (width if key.level else first)]
                    for key, start in zip(keys, starts, strict=True)
                ]
            )
        passes = model.passes(
            positions,
            [width if key.level else first for key in keys],
            [key.stage for key in keys],
            self._attention,
            self._pool,
        )
        return _Layout(topk, plans, levels, dict(zip(keys, passes, strict=True)), noise)

    def _extend(self, inputs: GrowthInputs, size: GrowthSize, layout: _Layout) -> torch.Tensor:
        """Extend all stages, and return the states of stage 0's last rows, ``[bs, hidden]``."""
        kept, plan = self.stage_states, layout.plans[0]
        features, run = inputs.features.flatten(0, 1), layout.passes[PassKey(0, 0)]
        self._attention.plan(self._extension(inputs, plan, size.rows))
        if kept is None:
            # The tree grows from the state of the last row. For the other rows, only K and V are computed.
            return run(plan.tokens, features, plan.features, Ends(self._extension(inputs, plan, 1)))
        places = kept.places(inputs.places, inputs.counts)
        before, stop = kept.read(places), inputs.committed_lens - 1 + self._model.lead
        fresh = kept.fresh_rows(places, stop, inputs.counts)
        states = run(plan.tokens, features, plan.features).view(size.bs, size.rows, -1)
        after = [states[:, -1]]
        for stage, plan in enumerate(layout.plans[1:], 1):
            # All stages receive the same fresh tokens, but later stages pair each position with a token that
            # is further ahead.
            joined = after_last(states, before[:, stage - 1], fresh).flatten(0, 1)
            ends = None if stage < self._model.stages - 1 else ONLY_KEYS
            rows = plan._replace(extend_slots=fresh_slots(plan.extend_slots, fresh))
            self._attention.plan(self._extension(inputs, rows, size.rows))
            out = layout.passes[PassKey(0, stage)](plan.tokens, joined, None, ends)
            if ends is None:
                states = out.view(size.bs, size.rows, -1)
                after.append(states[:, -1])
        kept.keep(places, torch.stack(after, 1), stop, fresh)
        return after[0]

    def _grow(
        self, inputs: GrowthInputs, size: GrowthSize, layout: _Layout, roots: torch.Tensor
    ) -> GrownTrees:
        """Grow trees from the states ``roots [bs, hidden]``."""
        depth, topk, root = size.depth, layout.topk, layout.plans[0]
        candidates = Candidates.make(size.bs, depth, topk, roots.device)
        # 1. The children of the roots are the first beam.
        beam = self._expand(roots, None, 0, size, layout, candidates)
        states = roots
        beams: list[Beam] = []
        made: list[torch.Tensor] = []  # states computed by the current stage, level by level
        for level, (*missed, own) in enumerate(layout.levels, 1):
            assert beam is not None, "only the last level has no next beam"
            # 2. If another stage takes over, run that stage over the earlier levels first, to fill its K/V.
            # The inputs of that stage are the states that the previous stage computed for the rows' parents.
            if missed:
                before = [self._last_states(inputs, own.stage - 1), *made]
                made = [
                    self._run(inputs, layout, key, rows, parents)
                    for key, rows, parents in zip(missed, beams, before, strict=False)
                ]
            # 3. Run the model over the beam, and expand its rows. The best children are the next beam.
            states = self._run(inputs, layout, own, beam, states)
            beams.append(beam)
            made.append(states)
            beam = self._expand(states, beam, level, size, layout, candidates)
        # 4. Keep the best candidates of all levels, and lay them out as trees.
        tree = tree_build(
            candidates.scores,
            candidates.tokens,
            candidates.parents,
            root.root_tokens,
            root.max_nodes,
            size.nodes,
            candidates.logprobs,
        )
        return GrownTrees(
            DraftBatch(tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors,
            logprobs=tree.logprobs), roots
        )  # fmt: skip

    def _last_states(self, inputs: GrowthInputs, stage: int) -> torch.Tensor:
        """Return the state of each sequence's last stable row in a stage, ``[bs, hidden]``."""
        kept = self.stage_states
        assert kept is not None, "a stage takes over only in a model with several stages"
        return kept.read(kept.places(inputs.places, inputs.counts))[:, stage]

    def _run(
        self, inputs: GrowthInputs, layout: _Layout, key: PassKey, beam: Beam, parents: torch.Tensor
    ) -> torch.Tensor:
        """Run a stage over the rows of a level. `parents` are the states of the previous level."""
        plan, topk = layout.plans[key.stage], layout.topk
        # In a chain, a row sees all earlier rows and has only one possible parent, so neither masks nor
        # parents are needed.
        masks, source = (beam.ancestors, beam.parents) if topk > 1 else (None, None)
        if key.stage > 1:
            stable_lens = inputs.committed_lens - 1 + self._model.lead
            masks = self._hidden_levels(key.stage, len(layout.levels) + 1, topk).apply(
                beam.ancestors, key.level, stable_lens
            )
        slots = plan.level_slots[key.level - 1]
        self._attention.plan(
            self._visible(inputs, plan.lens[1], plan.lens[1 + key.level], slots, topk, masks)
        )
        return layout.passes[key](beam.tokens, parents, source)

    def _expand(
        self,
        states: torch.Tensor,
        beam: Beam | None,
        level: int,
        size: GrowthSize,
        layout: _Layout,
        candidates: Candidates,
    ) -> Beam | None:
        return expand_level(
            self._model.logits(states),
            beam,
            level,
            layout.topk,
            candidates,
            words=mask_words(max(1, size.depth - 1) * layout.topk),
            last=level == size.depth - 1,
            d2t=self._model.vocabulary.d2t,
            noise=layout.noise,
        )

    def _extension(self, inputs: GrowthInputs, plan: RowPlan, rows: int) -> AttentionBatch:
        """Return the attention inputs of the last `rows` rows of each sequence's extension."""
        return self._visible(inputs, plan.lens[0], plan.lens[1], plan.extend_slots, rows, None)

    def _visible(
        self,
        inputs: GrowthInputs,
        prefix: torch.Tensor,
        ends: torch.Tensor,
        slots: torch.Tensor,
        rows: int,
        masks: torch.Tensor | None,
    ) -> AttentionBatch:
        """Return the attention inputs of `rows` rows per sequence."""
        return AttentionBatch(
            page_table=inputs.page_table,
            prefix_lens=prefix,
            kv_lens=ends,
            query_start=self._query_start(inputs.page_table.shape[0], rows),
            ancestors=masks,
            slots=slots,
            max_query_len=rows,
            max_kv_len=inputs.page_table.shape[1] * self._pool.page_size,
        )

    def _query_start(self, bs: int, rows: int) -> torch.Tensor:
        """Return the index of each sequence's first row, and the row count, as ``[bs + 1] int32``.

        The tensor comes from a cache on the device, because a recorded graph cannot copy it from the host.
        """
        if (bs, rows) not in self._starts:
            self._starts[bs, rows] = (torch.arange(bs + 1, dtype=torch.int32) * rows).to(self._model.device)
        return self._starts[bs, rows]

    def _hidden_levels(self, stage: int, depth: int, topk: int) -> HiddenLevels:
        """Return masks from a cache, because a graph cannot copy them from the host."""
        key = (stage, depth, topk)
        if key not in self._hidden:
            self._hidden[key] = HiddenLevels(stage, depth, topk, self._model.device)
        return self._hidden[key]
