"""Checks of verify_round, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.verify_round import (
    AcceptedRound,
    PlacedRows,
    RoundTensors,
    accept_round,
    begin_round,
    place_rows,
    post_parts,
    post_round,
)


def assert_equal(
    have: PlacedRows | AcceptedRound | RoundTensors, want: PlacedRows | AcceptedRound | RoundTensors
) -> None:
    for one in fields(want):
        actual, expected = getattr(have, one.name), getattr(want, one.name)
        assert actual.dtype is expected.dtype, one.name
        assert torch.equal(actual, expected), one.name


def random_state(bs: int, columns: int, rng: random.Random, device: str) -> RoundTensors:
    counts = [rng.randint(0, columns) for _ in range(bs)]
    tokens = [[rng.randrange(1, 99) if i < count else 0 for i in range(columns)] for count in counts]
    lens = [rng.randint(columns + 1, 60) for _ in range(bs)]
    return RoundTensors(
        *(torch.tensor(values, dtype=torch.int32, device=device) for values in (lens, tokens, counts))
    )


def copied(state: RoundTensors, guards: Guards | None = None) -> RoundTensors:
    put = guards.put if guards else torch.clone
    return RoundTensors(put(state.committed_lens), put(state.tokens), put(state.counts))


def check_begin_round(device: str, bs: int, columns: int, guards: Guards) -> None:
    rng = random.Random(bs * 100 + columns)
    state = random_state(bs, columns, rng, device)
    limits = torch.tensor([rng.choice([0, 30, 61, 200]) for _ in range(bs)], dtype=torch.int32, device=device)
    expected, actual = copied(state), copied(state, guards)
    with reference_version():
        roots = begin_round(expected, limits)
    with triton_version(guards):
        found = begin_round(actual, guards.put(limits))
    assert torch.equal(found, roots)
    assert_equal(actual, expected)
    for row in range(bs):
        count = int(state.counts[row]) if int(state.committed_lens[row]) < int(limits[row]) else 0
        assert int(expected.counts[row]) == count
        assert int(roots[row]) == (int(state.tokens[row, count - 1]) if count else 0)


def check_place_rows(device: str, bs: int, nodes: int, page_size: int, guards: Guards) -> None:
    rng = random.Random(bs * 1000 + nodes * 10 + page_size)
    pages = (60 + nodes) // page_size + 2
    live = [rng.choice([0, 1, 3]) for _ in range(bs)]
    lens = [rng.randint(1, 60) for _ in range(bs)]
    counts = [rng.randint(1, nodes) for _ in range(bs)]
    depths = [[rng.randint(0, 9) for _ in range(nodes)] for _ in range(bs)]
    table = [[rng.randrange(500) for _ in range(pages)] for _ in range(bs)]
    arguments = [
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (live, lens, depths, counts, table)
    ]
    with reference_version():
        expected = place_rows(*arguments, page_size)
    guarded = [guards.put(tensor) for tensor in arguments]
    with triton_version(guards):
        actual = place_rows(*guarded, page_size)
    assert_equal(actual, expected)
    slots, positions = expected.slots.view(bs, nodes).tolist(), expected.positions.view(bs, nodes).tolist()
    for row in range(bs):
        cached = lens[row] - 1 if live[row] else 0
        assert int(expected.kv_lens[row]) == cached + counts[row]
        for node in range(nodes):
            index = cached + node
            there = table[row][index // page_size] * page_size + index % page_size
            assert slots[row][node] == (there if live[row] and node < counts[row] else -1)
            assert positions[row][node] == cached + depths[row][node]


def random_tree(count: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return parents and tokens of a random tree whose siblings have different tokens."""
    return [-1, *(rng.randrange(node) for node in range(1, count))], [node % 100 for node in range(count)]


def check_accept_round(
    device: str, bs: int, nodes: int, columns: int, page_size: int, with_state: bool, guards: Guards
) -> None:
    rng = random.Random(bs * 1000 + nodes * 10 + columns)
    pages = (60 + max(nodes, columns)) // page_size + 2
    live = [rng.choice([0, 1, 1, 1]) for _ in range(bs)]
    cached = [rng.randint(0, 59) if alive else 0 for alive in live]
    counts = [rng.randint(1, nodes) for _ in range(bs)]
    trees = [random_tree(count, rng) for count in counts]
    accepted, path, emitted = [], [], []
    tokens, parents, chosen = ([[fill] * nodes for _ in range(bs)] for fill in (0, -1, -1))
    for row, (above, names) in enumerate(trees):
        parents[row][: counts[row]], tokens[row][: counts[row]] = above, names
        walked = [0]
        while (
            children := [node for node in range(1, counts[row]) if above[node] == walked[-1]]
        ) and rng.random() < 0.8:
            walked.append(rng.choice(children))
        for node in range(counts[row]):
            chosen[row][node] = rng.randrange(100, 200)  # no child's token
        for node, child in itertools.pairwise(walked):
            chosen[row][node] = names[child]
        if rng.random() < 0.3:
            chosen[row][walked[-1]] = -1  # poisoned logits
        accepted.append(len(walked) - 1)
        path.append(walked)
        emitted.append([chosen[row][node] for node in walked])
    table = [[rng.randrange(500) for _ in range(pages)] for _ in range(bs)]
    arguments = [
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (live, cached, tokens, parents, counts)
    ]
    arguments += [torch.tensor(chosen, device=device), torch.tensor(table, dtype=torch.int32, device=device)]
    state = random_state(bs, columns, rng, device)
    expected_state, actual_state = copied(state), copied(state, guards)
    with reference_version():
        expected = accept_round(*arguments, page_size, columns, expected_state if with_state else None)
    guarded = [guards.put(tensor) for tensor in arguments]
    with triton_version(guards):
        actual = accept_round(*guarded, page_size, columns, actual_state if with_state else None)
    assert_equal(actual, expected)
    assert_equal(actual_state, expected_state)
    assert expected.path.tolist() == [walked + [-1] * (nodes - len(walked)) for walked in path]
    kept = min(nodes, columns)
    rows, slots = (
        expected.feature_rows.view(bs, kept).tolist(),
        expected.feature_slots.view(bs, kept).tolist(),
    )
    for row in range(bs):
        taken = min(accepted[row], columns - 1)
        line = expected.packed[row].tolist()
        assert line[:2] == [taken if live[row] else -1, counts[row]]
        if not live[row]:
            assert line[2:] == [-1] * (2 * columns)
            assert set(slots[row]) == {-1}
            assert not with_state or int(expected_state.counts[row]) == 0
            continue
        said = emitted[row][: taken + 1]
        assert line[2 : 3 + taken] == path[row][: taken + 1]
        assert line[2 + columns : 3 + columns + taken] == said
        assert rows[row][: taken + 1] == [row * nodes + node for node in path[row][: taken + 1]]
        assert all(slot == -1 for slot in slots[row][taken + 1 :])
        index = cached[row] + taken
        assert slots[row][taken] == table[row][index // page_size] * page_size + index % page_size
        if with_state:
            goes_on = said[-1] >= 0
            assert int(expected_state.counts[row]) == (taken + 1 if goes_on else 0)
            assert expected_state.tokens[row].tolist() == (said if goes_on else []) + [0] * (
                columns - (len(said) if goes_on else 0)
            )
            assert int(expected_state.committed_lens[row]) == int(state.committed_lens[row]) + (
                taken + 1 if goes_on else 0
            )


def check_post_round(device: str, bs: int, columns: int, guards: Guards) -> None:
    """Check that each round is written to the next place of the ring, and that other places do not change."""
    rounds = [
        torch.arange(bs * columns, dtype=torch.int32).view(bs, columns) + 1000 * number for number in range(5)
    ]
    for version in (reference_version, lambda: triton_version(guards)):
        ring = guards.empty((3, bs, columns), torch.int32, torch.device("cpu"))
        if device == "cuda":
            if version is reference_version:
                continue  # only a kernel can write to pinned memory from a GPU
            ring = torch.zeros((3, bs, columns), dtype=torch.int32, pin_memory=True)
        ring.zero_()
        turn = guards.put(torch.zeros(1, dtype=torch.int32, device=device))
        with version():
            for packed in rounds:
                post_round(guards.put(packed.to(device)), ring, turn)
        if device == "cuda":
            torch.cuda.synchronize()
        assert int(turn) == 2
        assert [int(place[0, 0]) for place in ring] == [3000, 4000, 2000]
        assert all(torch.equal(place, rounds[number]) for place, number in zip(ring, (3, 4, 2), strict=True))


def check_post_parts(device: str, sizes: list[int], guards: Guards) -> None:
    """Check that the parts lie one behind the other in each place of the ring, and nothing else changes."""
    total, spare = sum(sizes), 3
    rounds = [torch.arange(total, dtype=torch.int32) + 10_000 * number for number in range(1, 6)]
    for version in (reference_version, lambda: triton_version(guards)):
        ring = guards.empty((3, total + spare), torch.int32, torch.device("cpu"))
        if device == "cuda":
            if version is reference_version:
                continue  # only a kernel can write to pinned memory from a GPU
            ring = torch.zeros((3, total + spare), dtype=torch.int32, pin_memory=True)
        ring.fill_(-7)
        turn = guards.put(torch.zeros(1, dtype=torch.int32, device=device))
        with version():
            for words in rounds:
                post_parts([guards.put(part) for part in words.to(device).split(sizes)], ring, turn)
        if device == "cuda":
            torch.cuda.synchronize()
        assert int(turn) == 2
        for place, number in zip(ring, (3, 4, 2), strict=True):
            assert torch.equal(place[:total], rounds[number])
            assert place[total:].tolist() == [-7] * spare
