"""One verify pass as device work alone: from trees and static tables to what was accepted, nothing waits for or asks the host.

So it can be recorded into a CUDA graph; on a CPU the same code runs at once. Rows that are idle, and columns behind a tree's nodes, are
computed like all others, but store nothing and accept nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from outrider.kernels.verify import verify_tree
from outrider.services.target.batch_tables import BatchTables, SamplingMode
from outrider.services.target.synthetic import SyntheticAcceptance
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder, DecoderOutput
from outrider.shared.nn.features import FeatureProjector
from outrider.shared.spec.device import RoundState
from outrider.shared.spec.tree import DraftBatch


@dataclass(frozen=True, slots=True)
class StepModel:
    """What a pass runs with. `projector` is None when no feature rows are wanted."""

    decoder: Decoder
    pool: KVPool
    attention: AttentionBackend
    projector: FeatureProjector | None
    synthetic: SyntheticAcceptance | None


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What a pass found; R columns.

    Attributes:
        num_accepted: ``[bs] int32``, accepted drafts, at most R - 1; -1 where the row is idle.
        emitted: ``[bs, R] int32``, the accepted tokens, then the bonus token; -1 behind them, and as a bonus whose logits are no numbers.
        features: ``[bs, ≤ R, feature_size]``, of the root and the accepted nodes; None without a projector. Rows behind them hold anything.
        packed: ``[bs, 2 + 2 R] int32`` for the host: num_accepted, num_nodes, path (the accepted nodes' indices, root first), emitted.
    """

    num_accepted: torch.Tensor
    emitted: torch.Tensor
    features: torch.Tensor | None
    packed: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostRow:
    """One row of `VerifiedStep.packed` on the host: `path` without the root."""

    num_nodes: int
    path: list[int]
    emitted: list[int]


def unpack(rows: list[list[int]]) -> list[HostRow | None]:
    """Read `VerifiedStep.packed`; None for an idle row."""
    columns = (len(rows[0]) - 2) // 2
    return [
        None if accepted < 0 else HostRow(num_nodes, rest[1 : 1 + accepted], rest[columns : columns + accepted + 1])
        for accepted, num_nodes, *rest in rows
    ]


def verify_step(
    model: StepModel,
    tables: BatchTables,
    mode: SamplingMode,
    committed_lens: torch.Tensor,
    live: torch.Tensor,
    drafts: DraftBatch,
    columns: int,
) -> VerifiedStep:
    """Verify one tree per row; move the accepted K/V to its place, compute and store the feature rows of the accepted nodes.

    Args:
        model: What runs.
        tables: Of this batch and as many nodes as `drafts` has columns.
        mode: Of the batch.
        committed_lens: ``[bs] int32``.
        live: ``[bs] bool``; other rows are idle.
        drafts: The trees, padded to the table's nodes.
        columns: R; a path with more tokens is cut, which is exact.
    """
    bs, nodes = drafts.tokens.shape
    cached = torch.where(live, committed_lens - 1, 0)
    num_nodes = drafts.num_nodes
    index = cached[:, None] + tables.node_index  # [bs, nodes]
    real = live[:, None] & (tables.node_index < num_nodes[:, None])
    slots = torch.where(real, _slots(tables, index), -1)
    positions = (cached[:, None] + drafts.depths).flatten().to(torch.int64)
    batch = AttentionBatch(
        page_table=tables.page_table,
        prefix_lens=cached,
        kv_lens=cached + num_nodes,
        query_start=tables.query_start,
        ancestors=None if nodes == 1 else drafts.ancestors.flatten(0, 1),
        slots=slots.flatten(),
        max_query_len=nodes,
        max_kv_len=tables.pages * tables.page_size,
    )
    projector = model.projector
    aux_layer_ids = tuple(projector.spec.aux_layer_ids) if projector else ()
    model.attention.plan(batch)
    output = model.decoder.forward(drafts.tokens.flatten().to(torch.int64), positions, model.attention, model.pool, aux_layer_ids)
    chosen = model.decoder.choose(output.hidden, tables.sampling(mode), positions + 1).view(bs, nodes)
    if model.synthetic is not None:
        chosen = model.synthetic(chosen, drafts, (cached + 1).to(torch.int64), tables.first_rows.seeds.contiguous())
    if nodes == 1:
        num_accepted, path, emitted = torch.zeros_like(cached), torch.zeros_like(drafts.tokens), chosen.to(torch.int32)
    else:
        walked = verify_tree(drafts.tokens, drafts.parents, num_nodes, chosen)
        num_accepted, path, emitted = walked.num_accepted.clamp(max=columns - 1), walked.path, walked.emitted
    num_accepted = torch.where(live, num_accepted, -1)
    if nodes > 1:
        model.pool.compact(tables.page_table, cached, path, num_accepted)
    path, emitted = _fit(path, columns), _fit(emitted, columns)
    features = None
    if projector is not None:
        features = _store_features(model.pool, projector, tables, output, path[:, :nodes], num_accepted, cached)
    packed = torch.cat((num_accepted[:, None], num_nodes[:, None], path, emitted), dim=1)
    return VerifiedStep(num_accepted, emitted, features, packed)


def begin_round(state: RoundState, tables: BatchTables) -> torch.Tensor:
    """Make the rows idle that ended; return which ones are live, ``[bs] bool``."""
    live = (state.counts > 0) & (state.committed_lens < tables.limits)
    state.counts.mul_(live)
    return live


def end_round(state: RoundState, step: VerifiedStep) -> None:
    """Write what the next round starts from. A row whose bonus token is no token goes idle: nobody drafts or verifies behind it."""
    bonus = step.emitted.gather(1, step.num_accepted.clamp(min=0).to(torch.int64)[:, None])[:, 0]
    counts = torch.where(bonus >= 0, step.num_accepted + 1, 0)
    column = torch.arange(state.columns, dtype=torch.int32, device=counts.device)
    state.tokens.copy_(torch.where(column < counts[:, None], step.emitted, 0))
    state.committed_lens.add_(counts)
    state.counts.copy_(counts)
    if step.features is not None and state.features.shape[2]:
        state.features[:, : step.features.shape[1]].copy_(step.features)


def root_batch(state: RoundState) -> DraftBatch:
    """Return trees of one node each, the root: a round of plain decoding."""
    tokens = state.roots()[:, None]
    return DraftBatch(
        tokens=tokens,
        parents=torch.full_like(tokens, -1),
        depths=torch.zeros_like(tokens),
        num_nodes=torch.ones_like(state.counts),
        ancestors=torch.ones_like(tokens)[:, :, None],
    )


def _store_features(
    pool: KVPool,
    projector: FeatureProjector,
    tables: BatchTables,
    output: DecoderOutput,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    cached: torch.Tensor,
) -> torch.Tensor:
    """Project the rows on the path and store those of the root and the accepted nodes; return ``[bs, path columns, feature_size]``."""
    bs, columns = path.shape
    first = tables.query_start[:-1, None]
    rows = (first + path.clamp(min=0)).flatten().to(torch.int64)
    picked = DecoderOutput(output.hidden[rows], None if output.aux is None else output.aux[rows])
    features = projector(picked)
    column = tables.node_index[:columns]
    slots = torch.where(column <= num_accepted[:, None], _slots(tables, cached[:, None] + column), -1)
    pool.store_some_features(features, slots.flatten())
    return features.view(bs, columns, -1)


def _slots(tables: BatchTables, index: torch.Tensor) -> torch.Tensor:
    """Return the slots of token indices ``[bs, n] int32``: ``[bs, n] int64``. An index behind the table's last page gets some slot."""
    pages = tables.page_table.gather(1, (index // tables.page_size).clamp(max=tables.pages - 1).to(torch.int64))
    return pages.to(torch.int64) * tables.page_size + index % tables.page_size


def _fit(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """Cut ``[bs, n]`` to R columns, or pad it with -1."""
    missing = columns - tensor.shape[1]
    return pad(tensor, (0, missing), value=-1) if missing > 0 else tensor[:, :columns]
