"""Reference of packed_round, on the host. `kernels.packed_round` documents the ops.

The two ops of every round use numpy. Their arrays are short, so overhead takes most of the time, and numpy's
overhead is a third of torch's.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
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

Numbers = npt.NDArray[Any]


def place_entries(
    state: SlotState,
    entries: Entries,
    trees: PackedTrees,
    page_table: torch.Tensor,
    page_size: int,
    sampling: SamplingTensors,
) -> PlacedEntries:
    device = trees.tokens.device
    owners, starts, drafted = _host(entries.slots), _host(entries.starts), _host(entries.drafted)
    tokens, depths, ancestors = _host(trees.tokens), _host(trees.depths), _host(trees.ancestors)
    parents, logprobs, num_nodes = _host(trees.parents), _host(trees.logprobs), _host(trees.num_nodes)
    slots = np.maximum(owners, 0)
    widths = starts[1:] - starts[:-1]
    counts, committed_lens = _host(state.counts)[slots], _host(state.committed_lens)[slots]
    live = (owners >= 0) & (widths > 0) & (counts > 0) & (committed_lens < _host(state.limits)[slots])
    # 1. Write the roots of entries without a drafted tree, and of idle entries.
    roots = np.where(live, _host(state.tokens)[slots, np.maximum(counts - 1, 0)], 0)
    plain = (widths > 0) & ~(live & (drafted > 0))
    at = starts[:-1][plain]
    tokens[at] = roots[plain]
    parents[at] = -1
    depths[at] = 0
    logprobs[at] = 0.0
    ancestors[at] = 0
    ancestors[at, 0] = 1
    num_nodes[plain | (widths == 0)] = 1
    if device.type != "cpu":
        _write_back(
            trees,
            PackedTrees(*map(torch.from_numpy, (tokens, parents, depths, ancestors, logprobs, num_nodes))),
        )
    # 2. Locate every row.
    cached = np.where(live, committed_lens - 1, 0)
    row = np.arange(len(tokens))
    entry = np.minimum(np.searchsorted(starts[1:], row, side="right"), len(slots) - 1)
    node = row - starts[entry]
    real = (row < starts[-1]) & live[entry] & (node < num_nodes[entry])
    positions = np.where(real, cached[entry] + depths, 0).astype(np.int64)
    index = np.where(real, cached[entry] + node, 0)
    slot = slots[entry]
    table = _host(page_table)
    pages = table[slot, np.minimum(index // page_size, table.shape[1] - 1)].astype(np.int64)
    return PlacedEntries(
        cached_lens=_tensor(cached.astype(np.int32), device),
        kv_lens=_tensor(np.where(live, cached + num_nodes, 0).astype(np.int32), device),
        table_rows=_tensor(np.where(live, owners, -1).astype(np.int32), device),
        positions=_tensor(positions, device),
        next_positions=_tensor(positions + 1, device),
        kv_slots=_tensor(np.where(real, pages * page_size + index % page_size, -1), device),
        sampling=_rows_of(sampling, slot, ~real),
    )


def _rows_of(sampling: SamplingTensors, slot: Numbers, idle: Numbers) -> SamplingTensors:
    """Return the sampling parameters of each row. The rows where `idle` is True get neutral parameters."""

    def rows_of(column: torch.Tensor, neutral: float) -> torch.Tensor:
        rows = _host(column)[slot]
        rows[idle] = neutral
        return _tensor(rows, column.device)

    return replace(
        sampling,
        temperature=rows_of(sampling.temperature, 0.0),
        top_k=rows_of(sampling.top_k, 0),
        top_p=rows_of(sampling.top_p, 1.0),
        min_p=rows_of(sampling.min_p, 0.0),
        seeds=rows_of(sampling.seeds, 0),
        choices=rows_of(sampling.choices, 0),
    )


def _host(tensor: torch.Tensor) -> Numbers:
    """Return a tensor as an array. If the tensor is on a CPU, the array shares its memory."""
    array: Numbers = tensor.cpu().numpy()
    return array


def _tensor(array: Numbers, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


def _write_back(on_device: PackedTrees | SlotState, changed: PackedTrees | SlotState) -> None:
    """Copy the changed tensors of the host to the device."""
    for one in fields(on_device):
        getattr(on_device, one.name).copy_(getattr(changed, one.name))


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
    path = np.full((results, columns), -1, dtype=np.int32)
    packed = np.full((results, 2 + 2 * columns), -1, dtype=np.int32)
    feature_rows = np.zeros(rows, dtype=np.int64)
    feature_slots = np.full(rows, -1, dtype=np.int64)
    feature_places = np.full(rows, -1, dtype=np.int64)
    starts, live = entries.starts.tolist(), placed.table_rows.tolist()
    captures, nodes = entries.captures.tolist(), trees.num_nodes.tolist()
    tokens, parents, after = trees.tokens.tolist(), trees.parents.tolist(), chosen.tolist()
    cached_lens, table = placed.cached_lens.tolist(), _host(page_table)
    kept_tokens, counts, committed_lens = (
        _host(state.tokens), _host(state.counts), _host(state.committed_lens),
    )  # fmt: skip
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
        path[e, : accepted + 1] = walked
        packed[e, 0] = accepted
        packed[e, 2 : 3 + accepted] = walked
        packed[e, 2 + columns : 3 + columns + accepted] = said
        # 2. Locate the feature rows of the path.
        if captures[e]:
            for column, node in enumerate(walked):
                index = cached_lens[e] + column
                page = int(table[slot, index // page_size])
                feature_rows[start + column] = start + node
                feature_slots[start + column] = page * page_size + index % page_size
                feature_places[start + column] = slot * columns + column
        # 3. Prepare the slot's next round.
        kept = said if said[-1] >= 0 else []
        kept_tokens[slot] = kept + [0] * (columns - len(kept))
        counts[slot] = len(kept)
        committed_lens[slot] += len(kept)
    if device.type != "cpu":
        changed = (committed_lens, _host(state.limits), kept_tokens, counts)
        _write_back(state, SlotState(*map(torch.from_numpy, changed)))
    return AcceptedEntries(
        path=_tensor(path, device),
        num_accepted=_tensor(packed[:, 0].copy(), device),
        packed=_tensor(packed, device),
        feature_rows=_tensor(feature_rows, device),
        feature_slots=_tensor(feature_slots, device),
        feature_places=_tensor(feature_places, device),
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
