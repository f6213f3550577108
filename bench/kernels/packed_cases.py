"""Cases of `outrider bench kernels` for rounds over slots, whose trees lie in packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from outrider.bench.kernels.case import KernelCase, KernelOptions, small_kernel
from outrider.bench.kernels.inputs import KernelSizes, chain_inputs, sampling
from outrider.kernels import packed_round
from outrider.kernels.feature_rows import scatter_rows
from outrider.kernels.packed_round import (
    Entries,
    GroupRows,
    PackedTrees,
    SlotState,
    accept_entries,
    gather_group,
    place_entries,
)
from outrider.kernels.synthetic_acceptance import packed_acceptance

UNLIMITED = 1 << 30


def packed_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield those kernels of a round over slots that are not part of a pass. Each tree has `nodes` nodes."""
    for batch in sizes.batches:
        yield from _round(sizes, batch)


def _round(sizes: KernelSizes, batch: int) -> Iterator[KernelCase]:
    device, columns, nodes = sizes.device, sizes.steps + 1, sizes.nodes
    case = f"{batch} trees of {nodes} nodes"
    pages = -(-(sizes.context + nodes + columns) // sizes.page_size) + 1
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)

    def ints(value: int) -> torch.Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=device)

    def state() -> SlotState:
        tokens = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        return SlotState(ints(sizes.context), ints(UNLIMITED), tokens, ints(columns))

    members = torch.arange(batch, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * nodes
    entries = Entries(members, starts, drafted=ints(1), captures=ints(1))
    how, slots, features = sampling(sizes, batch, 0.0), state(), sizes.random(batch, columns, sizes.hidden)
    group = GroupRows(
        ints(0), ints(0), torch.zeros_like(slots.tokens), torch.zeros_like(features),
        torch.zeros_like(how.temperature), torch.zeros_like(how.seeds), ints(0),
    )  # fmt: skip
    yield small_kernel(
        f"gather_group, {batch} slots", partial(gather_group, slots, features, how, members, entries, group)
    )
    tree = chain_inputs(sizes, batch)
    fields = (tree.tokens, tree.parents, tree.depths, tree.ancestors)
    tokens, parents, depths, ancestors = (torch.zeros_like(field.flatten(0, 1)) for field in fields)
    trees = PackedTrees(
        tokens=tokens,
        parents=parents,
        depths=depths,
        ancestors=ancestors,
        logprobs=torch.zeros(batch * nodes, device=device),
        num_nodes=torch.zeros_like(tree.num_nodes),
    )
    pack = partial(packed_round.pack_trees, *fields, tree.num_nodes, None, members, entries, trees)
    pack()
    yield small_kernel(f"packed_round.pack_trees, {case}", pack)
    place = partial(place_entries, slots, entries, trees, table, sizes.page_size, how)
    placed = place()
    yield small_kernel(f"place_entries, {case}", place)
    chosen = tree.chosen.flatten()
    accept = partial(
        accept_entries, state(), entries, trees, placed, chosen, table, sizes.page_size, results=batch
    )
    yield small_kernel(f"accept_entries, {case}", accept)
    located = accept_entries(state(), entries, trees, placed, chosen, table, sizes.page_size, results=batch)
    rows, plane = (
        sizes.random(batch * nodes, sizes.hidden),
        sizes.random(batch * pages, sizes.page_size, sizes.hidden),
    )
    yield small_kernel(
        f"scatter_rows, {batch * nodes} rows",
        partial(scatter_rows, rows, located.feature_slots, plane, located.feature_places, features),
    )
    yield small_kernel(
        f"packed_acceptance, {case}",
        partial(
            packed_acceptance, trees.tokens, trees.parents, trees.depths, trees.ancestors, starts,
            trees.num_nodes, chosen, placed.next_positions, placed.sampling.seeds, tree.thresholds,
            sizes.vocab,
        ),
    )  # fmt: skip
