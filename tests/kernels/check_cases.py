"""Checks of tree_check, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import random

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.tree_check import CheckedTrees, tree_check

VOCAB = 50
FRESH = 4


def _random_tree(rng: random.Random, columns: int, depth: int) -> tuple[list[int], list[int]]:
    tokens, parents, depths = [0], [0], [0]
    for _ in range(rng.randrange(columns)):
        parent = rng.choice([node for node, at in enumerate(depths) if at < depth])
        tokens.append(rng.randrange(VOCAB))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return tokens, parents


def _spoil(rng: random.Random, tokens: list[int], parents: list[int]) -> None:
    node = rng.randrange(1, len(tokens))
    kind = rng.randrange(4)
    if kind == 0:
        tokens[node] = rng.choice([-1, VOCAB, 1 << 30, -(1 << 31)])
    elif kind == 1:
        parents[node] = rng.choice([node, node + 1, -1, 1 << 30, -(1 << 31)])
    else:
        tokens[node], parents[node] = (rng.randrange(-(1 << 31), 1 << 31) for _ in range(2))


def believed(tokens: list[int], parents: list[int], nodes: int, columns: int, depth: int) -> bool:
    """Return whether a tree is valid, computed in plain Python."""
    if not 1 <= nodes <= columns:
        return False
    depths = [0]
    for node in range(1, nodes):
        if not (0 <= tokens[node] < VOCAB and 0 <= parents[node] < node):
            return False
        depths.append(depths[parents[node]] + 1)
    return max(depths) <= depth


def check_tree_check(
    device: str, bs: int, columns: int, depth: int, guards: Guards, *, number: int = 7, expected: int = 7
) -> None:
    """Compare with the reference, and the reference with plain Python.

    Every other row is corrupt or noise.
    """
    rng = random.Random(bs * 1000 + columns * 10 + depth + number)
    tokens, parents, nodes = [], [], []
    for row in range(bs):
        row_tokens, row_parents = _random_tree(rng, columns, depth)
        nodes.append(len(row_tokens))
        if row % 4 == 1 and len(row_tokens) > 1:
            _spoil(rng, row_tokens, row_parents)
        if row % 4 == 3:
            nodes[-1] = rng.choice([0, -5, columns + 1, 1 << 30, -(1 << 31), 1])
        fill = columns - len(row_tokens)
        tokens.append(row_tokens + [rng.randrange(-(1 << 31), 1 << 31) for _ in range(fill)])
        parents.append(row_parents + [rng.randrange(-(1 << 31), 1 << 31) for _ in range(fill)])
    counts = [row % (FRESH + 1) for row in range(1, bs + 1)]
    fresh = [[rng.randrange(VOCAB) for _ in range(FRESH)] for _ in range(bs)]
    given = [[number], [expected], nodes, tokens, parents, fresh, counts]
    arguments = [torch.tensor(value, dtype=torch.int32, device=device) for value in given]
    with reference_version():
        want = tree_check(*arguments, vocab_size=VOCAB, depth=depth)
    with triton_version(guards):
        have = tree_check(*(guards.put(argument) for argument in arguments), vocab_size=VOCAB, depth=depth)
    for name in CheckedTrees._fields:
        assert getattr(have, name).dtype == torch.int32
        assert getattr(have, name).tolist() == getattr(want, name).tolist(), name
    for row in range(bs):
        good = (
            number == expected
            and counts[row] > 0
            and believed(tokens[row], parents[row], nodes[row], columns, depth)
        )
        _check_row(want, row, counts[row], fresh[row], tokens[row], parents[row], nodes[row] if good else 1)


def _check_row(
    have: CheckedTrees,
    row: int,
    count: int,
    fresh: list[int],
    tokens: list[int],
    parents: list[int],
    nodes: int,
) -> None:
    columns = len(tokens)
    padding = columns - nodes
    assert have.num_nodes[row] == nodes
    root = fresh[count - 1] if count else 0
    assert have.tokens[row].tolist() == [root, *tokens[1:nodes]] + [0] * padding
    assert have.parents[row].tolist() == [-1, *parents[1:nodes]] + [-1] * padding
    depths, masks = [0], [1]
    for node in range(1, nodes):
        depths.append(depths[parents[node]] + 1)
        masks.append(masks[parents[node]] | 1 << node)
    assert have.depths[row].tolist() == depths + [0] * padding
    words = [[word & 0xFFFFFFFF for word in node] for node in have.ancestors[row].tolist()]
    assert [sum(word << 32 * index for index, word in enumerate(node)) for node in words] == masks + [
        0
    ] * padding
