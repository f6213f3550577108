"""Checks of packed_round, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.packed_round import (
    Entries,
    GroupRows,
    PackedTrees,
    PlacedEntries,
    SlotState,
    accept_entries,
    gather_group,
    pack_trees,
    place_entries,
)
from outrider.kernels.verify import SamplingTensors


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a random round.

    Attributes:
        slots: S, the number of slots.
        columns: R, the most tokens that a round emits for a slot.
        results: B, the number of entries that may be real.
        entries: E, the number of entries with padding.
        widest: Most rows of an entry.
        padding: Rows behind the last entry's rows.
        nodes: N, columns of the drafted trees.
        words: Words of the packed ancestor masks.
        page_size: Tokens per page.
    """

    slots: int
    columns: int
    results: int
    entries: int
    widest: int
    padding: int
    nodes: int
    words: int
    page_size: int = 4


def copied(values: Any, guards: Guards | None = None) -> Any:
    """Return a copy of a dataclass of tensors, in guarded buffers if `guards` is given."""
    put = guards.put if guards else torch.clone
    changed = {}
    for one in fields(values):
        value = getattr(values, one.name)
        if isinstance(value, torch.Tensor):
            changed[one.name] = put(value)
        elif is_dataclass(value):
            changed[one.name] = copied(value, guards)
    return replace(values, **changed)


def assert_equal(have: Any, want: Any) -> None:
    for one in fields(want):
        actual, expected = getattr(have, one.name), getattr(want, one.name)
        if is_dataclass(expected):
            assert_equal(actual, expected)
        elif isinstance(expected, torch.Tensor):
            assert actual.dtype is expected.dtype, one.name
            assert torch.equal(actual, expected), one.name
        else:
            assert actual == expected, one.name


class RandomInputs:
    """Random inputs of a round. All tensors are on `device`."""

    def __init__(self, sizes: Sizes, device: str, seed: int) -> None:
        self.sizes, self.device, self.rng = sizes, device, random.Random(seed)
        rng = self.rng
        counts = [rng.choice([0, 1, sizes.columns]) for _ in range(sizes.slots)]
        lens = [rng.randint(sizes.columns + 1, 60) for _ in counts]
        self.state = SlotState(
            committed_lens=self.ints(lens),
            limits=self.ints([rng.choice([committed, committed + 1, 90, 90]) for committed in lens]),
            tokens=self.ints(
                [[rng.randrange(1, 9) if i < count else 0 for i in range(sizes.columns)] for count in counts]
            ),
            counts=self.ints(counts),
        )
        slots = rng.sample(range(sizes.slots), sizes.results)
        slots = [-1 if rng.random() < 0.1 else slot for slot in slots]
        widths = [rng.choice([1, rng.randint(1, sizes.widest), sizes.widest]) for _ in slots]
        missing = sizes.entries - sizes.results
        starts = [sum(widths[:entry]) for entry in range(sizes.results)] + [sum(widths)] * (missing + 1)
        self.rows = starts[-1] + sizes.padding
        self.entries = Entries(
            slots=self.ints(slots + [-1] * missing),
            starts=self.ints(starts),
            drafted=self.ints([int(width > 1) for width in widths] + [0] * missing),
            captures=self.ints([rng.choice([0, 1, 1]) for _ in range(sizes.entries)]),
        )
        self.sampling = SamplingTensors(
            temperature=torch.tensor([rng.choice([0.0, 0.7]) for _ in counts], device=device),
            top_k=self.ints([rng.choice([0, 5]) for _ in counts]),
            top_p=torch.tensor([rng.choice([1.0, 0.9]) for _ in counts], device=device),
            min_p=torch.tensor([rng.choice([0.0, 0.1]) for _ in counts], device=device),
            seeds=torch.tensor([rng.randrange(-(2**63), 2**63) for _ in counts], device=device),
            choices=self.ints([rng.randrange(5) for _ in counts]),
            all_greedy=False,
            any_filter=True,
        )
        pages = (60 + max(sizes.widest, sizes.columns)) // sizes.page_size + 2
        self.page_table = self.ints([[rng.randrange(500) for _ in range(pages)] for _ in counts])
        # The packed rows still contain values of an earlier round.
        self.trees = PackedTrees(
            tokens=self.noise(self.rows),
            parents=self.noise(self.rows),
            depths=self.noise(self.rows),
            ancestors=self.noise(self.rows, sizes.words),
            logprobs=self.noise(self.rows).float(),
            num_nodes=self.noise(sizes.entries),
        )
        drafted = [entry for entry, width in enumerate(widths) if width > 1]
        rng.shuffle(drafted)
        self.members = self.ints([*drafted, -1])

    def ints(self, values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def noise(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        return torch.randint(-5, 40, shape, generator=generator, dtype=torch.int32).to(self.device)

    def group_trees(self) -> tuple[torch.Tensor, ...]:
        """Return random trees: tokens, parents, depths, ancestors and num_nodes. Siblings may be equal."""
        rng, bs, nodes = self.rng, self.members.shape[0], self.sizes.nodes
        words = -(-nodes // 32)
        tokens, parents, depths, masks, counts = [], [], [], [], []
        for row in range(bs):
            reach = rng.choice([1, 2, nodes])  # of 1, a chain
            above = [-1, *(rng.randrange(max(0, node - reach), node) for node in range(1, nodes))]
            depth, bits = [0], [1]
            for node in range(1, nodes):
                depth.append(depth[above[node]] + 1)
                bits.append(bits[above[node]] | 1 << node)
            tokens.append([rng.randrange(1, 4) for _ in range(nodes)])
            parents.append(above)
            depths.append(depth)
            masks.append([[mask >> 32 * word & 0xFFFFFFFF for word in range(words)] for mask in bits])
            counts.append(nodes if row == 0 else rng.randint(1, nodes))
        wide = torch.tensor(masks)
        ancestors = torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32).to(self.device)
        return self.ints(tokens), self.ints(parents), self.ints(depths), ancestors, self.ints(counts)


def check_gather_group(device: str, sizes: Sizes, columns: int, width: int, guards: Guards) -> None:
    case = RandomInputs(sizes, device, seed=columns * 10 + width)
    state = replace(case.state, counts=case.state.counts.clamp(max=columns))
    features = torch.randn(sizes.slots, sizes.columns, width, generator=torch.Generator().manual_seed(1))
    features = features.to(device)
    rows = case.members.shape[0]
    group = GroupRows(
        committed_lens=case.noise(rows),
        counts=case.noise(rows),
        tokens=case.noise(rows, columns),
        features=torch.zeros(rows, columns, width, device=device),
        temperature=torch.zeros(rows, device=device),
        seeds=torch.zeros(rows, dtype=torch.int64, device=device),
        choices=case.noise(rows),
    )
    actual = copied(group, guards)
    with reference_version():
        gather_group(state, features, case.sampling, case.members, case.entries, group)
    with triton_version(guards):
        gather_group(
            copied(state, guards), guards.put(features), copied(case.sampling, guards),
            guards.put(case.members), copied(case.entries, guards), actual,
        )  # fmt: skip
    assert_equal(actual, group)
    for row, entry in enumerate(case.members.tolist()):
        slot = int(case.entries.slots[entry]) if entry >= 0 else -1
        lens, limits = state.committed_lens.tolist(), state.limits.tolist()
        live = slot >= 0 and int(state.counts[slot]) > 0 and lens[slot] < limits[slot]
        assert int(group.counts[row]) == (int(state.counts[slot]) if live else 0)
        assert int(group.committed_lens[row]) == (lens[slot] if live else 1)
        if live:
            assert torch.equal(group.tokens[row], state.tokens[slot, :columns])
            assert torch.equal(group.features[row], features[slot, :columns])


def check_round(device: str, sizes: Sizes, with_logprobs: bool, seed: int, guards: Guards) -> int:
    """Check pack_trees, place_entries and accept_entries in a row. Return the number of accepted drafts."""
    case = RandomInputs(sizes, device, seed)
    expected_trees, actual_trees = copied(case.trees), copied(case.trees, guards)
    entries, guarded = case.entries, copied(case.entries, guards)
    tokens, parents, depths, ancestors, num_nodes = case.group_trees()
    logprobs = torch.rand(tokens.shape, device=device) if with_logprobs else None
    # 1. Pack.
    grown = [tokens, parents, depths, ancestors, num_nodes, logprobs, case.members]
    with reference_version():
        pack_trees(*grown, entries, expected_trees)
    with triton_version(guards):
        put = [None if tensor is None else guards.put(tensor) for tensor in grown]
        pack_trees(*put, guarded, actual_trees)
    assert_equal(actual_trees, expected_trees)
    # 2. Place.
    expected_state, actual_state = copied(case.state), copied(case.state, guards)
    table = guards.put(case.page_table)
    with reference_version():
        expected = place_entries(
            expected_state, entries, expected_trees, case.page_table, sizes.page_size, case.sampling
        )
    with triton_version(guards):
        actual = place_entries(
            actual_state, guarded, actual_trees, table, sizes.page_size, copied(case.sampling, guards)
        )
    assert_equal(actual_trees, expected_trees)
    assert_equal(actual, expected)
    check_placed(case, expected_trees, expected)
    # 3. Accept.
    chosen = torch.randint(1, 4, (case.rows,), generator=torch.Generator().manual_seed(seed))
    chosen[torch.rand(case.rows, generator=torch.Generator().manual_seed(seed)) < 0.1] = -1
    chosen = chosen.to(device)
    with reference_version():
        result = accept_entries(
            expected_state, entries, expected_trees, expected, chosen, case.page_table, sizes.page_size,
            sizes.results,
        )  # fmt: skip
    with triton_version(guards):
        found = accept_entries(
            actual_state,
            guarded,
            actual_trees,
            actual,
            guards.put(chosen),
            table,
            sizes.page_size,
            sizes.results,
        )
    assert_equal(found, result)
    assert_equal(actual_state, expected_state)
    assert_equal(actual_trees, expected_trees)
    for entry in range(sizes.results):
        assert_walk(case, expected_trees, expected, chosen.tolist(), result.packed[entry].tolist(), entry)
    stored = result.feature_slots >= 0
    assert torch.equal(stored, result.feature_places >= 0)
    assert int(result.feature_rows.min()) >= 0
    assert int(result.feature_rows.max()) < case.rows
    return int(result.num_accepted.clamp(min=0).sum())


def check_placed(case: RandomInputs, trees: PackedTrees, placed: PlacedEntries) -> None:
    """Check the locations of all rows, one at a time."""
    state, starts = case.state, case.entries.starts.tolist()
    owners = [
        (entry, row - starts[entry])
        for entry in range(case.sizes.entries)
        for row in range(starts[entry], starts[entry + 1])
    ]
    owners += [(-1, 0)] * (case.rows - len(owners))
    for row, (entry, node) in enumerate(owners):
        slot = int(case.entries.slots[entry]) if entry >= 0 else -1
        live = slot >= 0 and int(state.counts[slot]) > 0
        live = live and int(state.committed_lens[slot]) < int(state.limits[slot])
        if not live or node >= int(trees.num_nodes[entry]):
            assert int(placed.kv_slots[row]) == -1
            assert (int(placed.positions[row]), float(placed.sampling.temperature[row])) == (0, 0.0)
            continue
        cached = int(state.committed_lens[slot]) - 1
        index, size = cached + node, case.sizes.page_size
        assert int(placed.kv_slots[row]) == int(case.page_table[slot, index // size]) * size + index % size
        assert int(placed.positions[row]) == cached + int(trees.depths[row])
        assert int(placed.sampling.seeds[row]) == int(case.sampling.seeds[slot])
        assert int(placed.kv_lens[entry]) == cached + int(trees.num_nodes[entry])


def assert_walk(
    case: RandomInputs,
    trees: PackedTrees,
    placed: PlacedEntries,
    chosen: list[int],
    packed: list[int],
    entry: int,
) -> None:
    """Check that an entry's result is the walk to the first matching child, cut to R tokens."""
    columns, start = case.sizes.columns, int(case.entries.starts[entry])
    nodes = int(trees.num_nodes[entry])
    path: list[int] = []
    here: int | None = 0 if int(placed.table_rows[entry]) >= 0 else None
    while here is not None and len(path) < columns:
        path.append(here)
        children = [node for node in range(1, nodes) if int(trees.parents[start + node]) == here]
        wanted = chosen[start + here]
        here = next((node for node in children if int(trees.tokens[start + node]) == wanted), None)
    assert packed[:2] == [len(path) - 1, nodes]
    assert packed[2 : 2 + columns] == path + [-1] * (columns - len(path))
    said = [chosen[start + node] for node in path]
    assert packed[2 + columns :] == said + [-1] * (columns - len(said))
