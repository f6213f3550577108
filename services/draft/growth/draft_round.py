"""One drafting round entirely on the device: extends the draft's KV, grows the levels and builds the trees.

The round needs nothing from the host, so it can be one CUDA graph. A round computes the same results as
`DraftStrategy.extend` followed by `HostGrower.grow`, but it reads the sequence lengths from device memory.
Every sequence extends by R rows, of which the last `counts` are real (`kernels.round_plan`). Idle sequences
are computed as well, but they read and write no KV.

Stable rows are the KV rows of committed tokens. A tree grows from the root, the last committed token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.round_plan import RoundPlan, round_plan
from outrider.kernels.topk_expand import Beam, Candidates, Noise, expand_level
from outrider.kernels.tree_build import tree_build
from outrider.services.draft.growth.recurrent_head import Ends
from outrider.services.draft.growth.round_model import RoundModel, RoundPass
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import DraftBatch, DraftShape, mask_words


@dataclass(frozen=True, slots=True)
class GrowthSize:
    """The sizes of a round, fixed by the host. Rounds with equal sizes and equal addresses share one graph.

    Attributes:
        bs: Number of sequences, idle ones included.
        rows: R, the largest number of rows by which a sequence is extended.
        depth, topk: Depth and level width of the trees.
        nodes: Columns of the trees.
    """

    bs: int
    rows: int
    depth: int
    topk: int
    nodes: int

    @classmethod
    def of(cls, bs: int, shape: DraftShape) -> GrowthSize:
        """Return the size of rounds whose previous round had trees of the same shape."""
        shape = shape.bounded()
        return cls(bs, max_round_rows(shape), shape.depth, shape.topk, shape.max_nodes)


def max_round_rows(shape: DraftShape) -> int:
    """Return the largest number of tokens that a round with trees of this shape can choose."""
    return min(shape.depth, shape.max_nodes - 1) + 1


@dataclass(frozen=True, slots=True)
class GrowthInputs:
    """Inputs of a round, on the device.

    Attributes:
        committed_lens: ``[bs] int32``, committed tokens, the root included.
        counts: ``[bs] int32``, number of fresh tokens: 1..R, or 0 if idle.
        tokens: ``[bs, columns] int32``, the fresh tokens, the root last.
        features: ``[bs, columns, width]``, one feature per fresh token.
        max_nodes: ``[bs] int32``, node limit of each tree.
        page_table: ``[bs, pages] int32``.
        temperature, seeds, choices: ``[bs]`` fp32, int64 and int32: the target's sampling noise.
    """

    committed_lens: torch.Tensor
    counts: torch.Tensor
    tokens: torch.Tensor
    features: torch.Tensor
    max_nodes: torch.Tensor
    page_table: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    choices: torch.Tensor


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Outputs of a round.

    Attributes:
        trees: ``[bs, nodes]``; the tree of an idle sequence has one node.
        states: ``[bs, hidden]``, the states of the last stable rows, from which the trees grew.
    """

    trees: DraftBatch
    states: torch.Tensor


class RoundDrafter:
    """Runs rounds with one model over one KV pool.

    Args:
        model: The draft model.
        attention: Attention backend of the model.
        pool: KV pool of the model.
    """

    def __init__(self, model: RoundModel, attention: AttentionBackend, pool: KVPool) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._starts: dict[tuple[int, int], torch.Tensor] = {}

    def draft(self, inputs: GrowthInputs, shape: GrowthSize) -> GrownTrees:
        """Enqueue one round.

        In the KV, the extension's rows are written after the stable rows. The levels' rows follow the
        extension's rows.
        """
        model, pool, bs = self._model, self._pool, shape.bs
        topk = min(shape.topk, model.vocabulary.size)
        # 1. Lay out the rows of the round.
        plan = round_plan(
            inputs.committed_lens,
            inputs.counts,
            inputs.tokens,
            inputs.max_nodes,
            inputs.page_table,
            rows=shape.rows,
            depth=shape.depth,
            topk=topk,
            page_size=pool.page_size,
            lead=model.lead,
        )
        # 2. Extend by the fresh tokens.
        extend, *levels = model.passes(
            plan.positions, [bs * shape.rows] + [bs * topk] * (shape.depth - 1), self._attention, pool
        )  # fmt: skip
        every, last = (
            self._visible(inputs, plan.lens[0], plan.lens[1], plan.extend_slots, rows, None)
            for rows in (shape.rows, 1)
        )
        self._attention.plan(every)
        # The tree grows from the state of the last row. For the other rows, only K and V are computed.
        roots = extend(plan.tokens, inputs.features.flatten(0, 1), plan.features, Ends(last))  # [bs, hidden]
        # 3. Grow the levels, and build the trees from all candidates.
        candidates = self._grow(inputs, plan, levels, roots, shape.depth, topk)
        tree = tree_build(
            candidates.scores,
            candidates.tokens,
            candidates.parents,
            plan.root_tokens,
            plan.max_nodes,
            shape.nodes,
            candidates.logprobs,
        )
        return GrownTrees(
            DraftBatch(tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors,
            logprobs=tree.logprobs), roots
        )  # fmt: skip

    def _grow(
        self,
        inputs: GrowthInputs,
        plan: RoundPlan,
        levels: list[RoundPass],
        roots: torch.Tensor,
        depth: int,
        topk: int,
    ) -> Candidates:
        """Return all candidates of the trees that grow from the states ``roots [bs, hidden]``."""
        model, bs, device = self._model, roots.shape[0], roots.device
        candidates = Candidates.make(bs, depth, topk, device)
        words = mask_words(max(1, depth - 1) * topk)
        noise = Noise(inputs.temperature, inputs.seeds, inputs.committed_lens, inputs.choices)
        states, beam = roots, None
        for level in range(depth):
            if beam is not None:
                # With topk = 1, a row sees everything before it and has only one possible parent, so neither
                # masks nor parents are needed.
                masks, parents = (beam.ancestors, beam.parents) if topk > 1 else (None, None)
                self._attention.plan(
                    self._visible(
                        inputs, plan.lens[1], plan.lens[1 + level], plan.level_slots[level - 1], topk, masks
                    )
                )
                states = levels[level - 1](beam.tokens, states, parents)
            beam = self._expand(model.logits(states), beam, level, topk, candidates, words, depth, noise)
        return candidates

    def _expand(
        self,
        logits: torch.Tensor,
        beam: Beam | None,
        level: int,
        topk: int,
        candidates: Candidates,
        words: int,
        depth: int,
        noise: Noise,
    ) -> Beam | None:
        d2t, last = self._model.vocabulary.d2t, level == depth - 1
        return expand_level(
            logits, beam, level, topk, candidates, words=words, last=last, d2t=d2t, noise=noise
        )

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

        The tensor comes from a cache, because a graph cannot copy it from the host.
        """
        if (bs, rows) not in self._starts:
            self._starts[bs, rows] = (torch.arange(bs + 1, dtype=torch.int32) * rows).to(self._model.device)
        return self._starts[bs, rows]
