"""Torch reference of packed_round. `kernels.packed_round` documents the ops."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.kernels.packed_round.types import (
    AcceptedEntries,
    Entries,
    GroupRows,
    PackedTrees,
    PlacedEntries,
    SlotState,
)
from outrider.kernels.verify.types import SamplingTensors


def place_entries(
    state: SlotState,
    entries: Entries,
    trees: PackedTrees,
    page_table: torch.Tensor,
    page_size: int,
    sampling: SamplingTensors,
) -> PlacedEntries:
    rows, device = trees.tokens.shape[0], trees.tokens.device
    slots = entries.slots.long().clamp(min=0)
    starts = entries.starts[:-1].long()
    widths = entries.starts[1:].long() - starts
    counts = state.counts[slots].long()
    below = state.committed_lens[slots] < state.limits[slots]
    live = (entries.slots >= 0) & (widths > 0) & (counts > 0) & below
    # 1. Write the roots of entries without a drafted tree, and of idle entries.
    roots = torch.where(live, state.tokens[slots, (counts - 1).clamp(min=0)], 0)
    plain = (widths > 0) & ~(live & (entries.drafted > 0))
    at = starts[plain]
    trees.tokens[at] = roots[plain]
    trees.parents[at] = -1
    trees.depths[at] = 0
    trees.logprobs[at] = 0.0
    trees.ancestors[at] = 0
    trees.ancestors[at, 0] = 1
    trees.num_nodes[plain | (widths == 0)] = 1
    # 2. Locate every row.
    cached = torch.where(live, state.committed_lens[slots] - 1, 0)
    row = torch.arange(rows, device=device)
    entry = (torch.searchsorted(entries.starts[1:].long(), row, right=True)).clamp(max=len(slots) - 1)
    node = row - starts[entry]
    inside = row < entries.starts[-1]
    real = inside & live[entry] & (node < trees.num_nodes[entry])
    positions = torch.where(real, cached[entry] + trees.depths, 0).long()
    index = torch.where(real, cached[entry] + node, 0)
    slot = slots[entry]
    pages = page_table[slot, (index // page_size).clamp(max=page_table.shape[1] - 1)].long()
    return PlacedEntries(
        cached_lens=cached.to(torch.int32),
        kv_lens=torch.where(live, cached + trees.num_nodes, 0).to(torch.int32),
        table_rows=torch.where(live, entries.slots, -1).to(torch.int32),
        positions=positions,
        next_positions=positions + 1,
        kv_slots=torch.where(real, pages * page_size + index % page_size, -1),
        sampling=_rows_of(sampling, slot, real),
    )


def _rows_of(sampling: SamplingTensors, slot: torch.Tensor, real: torch.Tensor) -> SamplingTensors:
    """Return the sampling parameters of each row; rows that are not real get neutral parameters."""
    return replace(
        sampling,
        temperature=torch.where(real, sampling.temperature[slot], 0.0),
        top_k=torch.where(real, sampling.top_k[slot], 0),
        top_p=torch.where(real, sampling.top_p[slot], 1.0),
        min_p=torch.where(real, sampling.min_p[slot], 0.0),
        seeds=torch.where(real, sampling.seeds[slot], 0),
        choices=torch.where(real, sampling.choices[slot], 0),
    )


def accept_entries(
    state: SlotState,
    entries: Entries,
    trees: PackedTrees,
    placed: PlacedEntries,
    chosen: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    results: int,
) -> AcceptedEntries:
    rows, columns = trees.tokens.shape[0], state.tokens.shape[1]
    device = trees.tokens.device
    path = torch.full((results, columns), -1, dtype=torch.int32)
    packed = torch.full((results, 2 + 2 * columns), -1, dtype=torch.int32)
    feature_rows = torch.zeros(rows, dtype=torch.int64)
    feature_slots = torch.full((rows,), -1, dtype=torch.int64)
    feature_places = torch.full((rows,), -1, dtype=torch.int64)
    starts, live = entries.starts.tolist(), placed.table_rows.tolist()
    captures, nodes = entries.captures.tolist(), trees.num_nodes.tolist()
    tokens, parents, after = trees.tokens.tolist(), trees.parents.tolist(), chosen.tolist()
    cached_lens = placed.cached_lens.tolist()
    for e in range(results):
        packed[e, 1] = nodes[e]
        slot = live[e]
        if slot < 0:
            continue
        # 1. Walk the tree, up to R tokens.
        start, at = starts[e], 0
        walked, said = [0], [after[start]]
        for node in range(1, nodes[e]):
            if len(walked) == columns:
                break
            if parents[start + node] == at and tokens[start + node] == said[-1]:
                at = node
                walked.append(node)
                said.append(after[start + node])
        accepted = len(walked) - 1
        path[e, : accepted + 1] = torch.tensor(walked)
        packed[e, 0] = accepted
        packed[e, 2 : 3 + accepted] = torch.tensor(walked)
        packed[e, 2 + columns : 3 + columns + accepted] = torch.tensor(said)
        # 2. Locate the feature rows of the path.
        if captures[e]:
            for column, node in enumerate(walked):
                index = cached_lens[e] + column
                page = int(page_table[slot, index // page_size])
                feature_rows[start + column] = start + node
                feature_slots[start + column] = page * page_size + index % page_size
                feature_places[start + column] = slot * columns + column
        # 3. Prepare the slot's next round.
        kept = said if said[-1] >= 0 else []
        state.tokens[slot] = torch.tensor(kept + [0] * (columns - len(kept)), dtype=torch.int32)
        state.counts[slot] = len(kept)
        state.committed_lens[slot] += len(kept)
    return AcceptedEntries(
        path=path.to(device),
        num_accepted=packed[:, 0].contiguous().to(device),
        packed=packed.to(device),
        feature_rows=feature_rows.to(device),
        feature_slots=feature_slots.to(device),
        feature_places=feature_places.to(device),
    )


def pack_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    num_nodes: torch.Tensor,
    logprobs: torch.Tensor | None,
    members: torch.Tensor,
    entries: Entries,
    trees: PackedTrees,
) -> None:
    words = min(ancestors.shape[2], trees.ancestors.shape[1])
    for row, entry in enumerate(members.tolist()):
        if entry < 0:
            continue
        start, stop = int(entries.starts[entry]), int(entries.starts[entry + 1])
        nodes = min(int(num_nodes[row]), stop - start)
        here = slice(start, start + nodes)
        trees.tokens[here] = tokens[row, :nodes]
        trees.parents[here] = parents[row, :nodes]
        trees.depths[here] = depths[row, :nodes]
        trees.ancestors[here] = 0
        trees.ancestors[here, :words] = ancestors[row, :nodes, :words]
        trees.logprobs[here] = 0.0 if logprobs is None else logprobs[row, :nodes]
        trees.num_nodes[entry] = nodes


def gather_group(
    state: SlotState,
    features: torch.Tensor,
    sampling: SamplingTensors,
    members: torch.Tensor,
    entries: Entries,
    group: GroupRows,
) -> None:
    columns = group.tokens.shape[1]
    slots = torch.where(members >= 0, entries.slots[members.long().clamp(min=0)], -1).long()
    at = slots.clamp(min=0)
    live = (slots >= 0) & (state.counts[at] > 0) & (state.committed_lens[at] < state.limits[at])
    group.committed_lens.copy_(torch.where(live, state.committed_lens[at], 1))
    group.counts.copy_(torch.where(live, state.counts[at].clamp(max=columns), 0))
    group.tokens.copy_(torch.where(live[:, None], state.tokens[at, :columns], 0))
    if features.shape[2]:
        group.features.copy_(features[at, :columns])
    group.temperature.copy_(sampling.temperature[at])
    group.seeds.copy_(sampling.seeds[at])
    group.choices.copy_(sampling.choices[at])
