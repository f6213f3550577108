"""One verify pass that runs entirely on the device, from trees and input tables to accepted tokens.

The pass does not need the host, so it can be recorded into a CUDA graph. On a CPU, the same code runs
directly. Idle rows and columns after a tree's last node are computed like all others, but store and accept
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels.verify_round import RoundTensors, accept_round, place_rows
from outrider.services.target.model.input_batch import InputBatch, SamplingMode
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.synthetic_acceptance import SyntheticAcceptance
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.nn.feature_projector import FeatureProjector
from outrider.shared.spec.tree import DraftBatch


@dataclass(frozen=True, slots=True)
class StepModel:
    """The model and memory that a pass runs with. `projector` is None if no feature rows are wanted."""

    decoder: Decoder
    pool: KVPool
    attention: AttentionBackend
    projector: FeatureProjector | None
    synthetic: SyntheticAcceptance | None


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """The result of a pass.

    Attributes:
        packed: ``[bs, 2 + 2 R] int32`` for the host, which decodes it with `unpack`.
        features: ``[bs, C, feature_size]`` with C = min(N, R). Contains the feature rows of the root and the
            accepted nodes, followed by arbitrary values. None without a projector.
    """

    packed: torch.Tensor
    features: torch.Tensor | None


def unpack(rows: list[list[int]]) -> list[Outcome | None]:
    """Decode `VerifiedStep.packed` into one outcome per row. The outcome of an idle row is None."""
    columns = (len(rows[0]) - 2) // 2
    return [
        None
        if accepted < 0
        else Outcome(num_nodes, rest[1 : 1 + accepted], rest[columns : columns + accepted + 1])
        for accepted, num_nodes, *rest in rows
    ]


def verify_step(
    model: StepModel,
    tables: InputBatch,
    mode: SamplingMode,
    live: torch.Tensor,
    committed_lens: torch.Tensor,
    drafts: DraftBatch,
    columns: int,
    state: RoundTensors | None = None,
    features_out: torch.Tensor | None = None,
) -> VerifiedStep:
    """Verify one tree per row, compact the accepted K/V, and store the feature rows of the accepted nodes.

    Args:
        model: The model and memory to run with.
        tables: The batch's inputs, with the same number of nodes as `drafts` has columns.
        mode: Sampling mode of the batch.
        live: ``[bs] int32``; 0 for idle rows.
        committed_lens: ``[bs] int32``.
        drafts: The trees, padded to the nodes of `tables`.
        columns: R, the maximum number of tokens per row. A longer path is cut. The rest is generated in later
            rounds, so the output tokens do not change.
        state: Receives the state for the next round; see `accept_round`. None writes no state.
        features_out: ``[bs, C or more, feature_size]``; receives the feature rows. None allocates a tensor.
    """
    # 1. Plan: place each row's nodes behind its cached tokens.
    bs, nodes = drafts.tokens.shape
    pool, page_size = model.pool, tables.page_size
    placed = place_rows(live, committed_lens, drafts.depths, drafts.num_nodes, tables.page_table, page_size)
    batch = AttentionBatch(
        page_table=tables.page_table,
        prefix_lens=placed.cached_lens,
        kv_lens=placed.kv_lens,
        query_start=tables.query_start,
        ancestors=None if nodes == 1 else drafts.ancestors.flatten(0, 1),
        slots=placed.slots,
        max_query_len=nodes,
        max_kv_len=tables.pages * page_size,
    )

    # 2. Forward, and sample a token after every node.
    projector = model.projector
    aux_layer_ids = tuple(projector.spec.aux_layer_ids) if projector else ()
    model.attention.plan(batch)
    output = model.decoder.forward(
        drafts.tokens.flatten(), placed.positions, model.attention, pool, aux_layer_ids
    )
    chosen = model.decoder.choose(output.hidden, tables.sampling(mode), placed.next_positions).view(bs, nodes)
    if nodes > 1 and model.synthetic is not None:
        chosen = model.synthetic(chosen, drafts, placed.next_positions[::nodes], tables.first_rows.seeds)

    # 3. Accept: walk the trees, then move the K/V of the accepted nodes to their final slots.
    trees = drafts.tokens, drafts.parents, drafts.num_nodes
    accepted = accept_round(
        live, placed.cached_lens, *trees, chosen, tables.page_table, page_size, columns, state
    )
    if nodes > 1:
        pool.compact(tables.page_table, placed.cached_lens, accepted.path[:, :columns], accepted.num_accepted)

    # 4. Compute and store the feature rows of the accepted nodes.
    features = None
    if projector is not None:
        rows = projector.parts(_picked(output, accepted.feature_rows, projector.spec.final_hidden))
        kept = min(nodes, columns)
        features = (
            rows.new_empty((bs, kept, rows.shape[-1]), dtype=pool.dtype)
            if features_out is None
            else features_out[:, :kept]
        )
        pool.place_features(rows, accepted.feature_slots, features)
    return VerifiedStep(accepted.packed, features)


def root_batch(roots: torch.Tensor, tables: InputBatch) -> DraftBatch:
    """Return single-node trees of ``roots [bs, 1] int32``, for a round of plain decoding."""
    ones = tables.ones
    return DraftBatch(roots, tables.no_parent[:, None], tables.nothing[:, None], ones, ones[:, None, None])


def _picked(output: DecoderOutput, rows: torch.Tensor, final_hidden: bool) -> DecoderOutput:
    """Return only those output rows from which features are computed."""
    if final_hidden or output.aux is None:
        return DecoderOutput(output.hidden[rows], None)
    return DecoderOutput(output.hidden[:0], output.aux[rows])
