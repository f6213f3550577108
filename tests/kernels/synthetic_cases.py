"""Checks of synthetic_acceptance, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import math
import random

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.synthetic_acceptance import packed_acceptance, synthetic_acceptance
from outrider.kernels.verify import verify_tree

VOCAB = 97


def random_trees(bs: int, columns: int, rng: random.Random) -> tuple[torch.Tensor, ...]:
    """Return tokens, parents, depths, num_nodes and ancestors of random trees; row 0 is a chain.

    Siblings have different tokens.
    """
    words = max(1, -(-columns // 32))
    tokens = torch.zeros(bs, columns, dtype=torch.int32)
    parents = torch.full((bs, columns), -1, dtype=torch.int32)
    depths = torch.zeros(bs, columns, dtype=torch.int32)
    counts = [columns if row < 2 else rng.randint(1, columns) for row in range(bs)]
    masks = torch.zeros(bs, columns, words, dtype=torch.int64)
    for row, count in enumerate(counts):
        used: dict[int, set[int]] = {}
        bits = [1]
        for node in range(1, count):
            parent = node - 1 if row == 0 else rng.randrange(node)
            token = rng.choice(
                [value for value in range(VOCAB) if value not in used.setdefault(parent, set())]
            )
            used[parent].add(token)
            tokens[row, node], parents[row, node], depths[row, node] = token, parent, depths[row, parent] + 1
            bits.append(bits[parent] | 1 << node)
        for node, mask in enumerate(bits):
            for word in range(words):
                masks[row, node, word] = mask >> 32 * word & 0xFFFFFFFF
    ancestors = torch.where(masks >= 1 << 31, masks - (1 << 32), masks).to(torch.int32)
    return tokens, parents, depths, torch.tensor(counts, dtype=torch.int32), ancestors


def check_synthetic_acceptance(device: str, bs: int, columns: int, guards: Guards) -> None:
    """Check that both versions agree and that the walk accepts the drawn number of drafts.

    The token after the last draft must be one that no child carries.
    """
    rng = random.Random(bs * 1000 + columns)
    trees = [field.to(device) for field in random_trees(bs, columns, rng)]
    generator = torch.Generator().manual_seed(columns)
    # Let each node choose the token of one of its children, which the bonus token must avoid.
    chosen = torch.randint(0, VOCAB, (bs, columns), generator=generator)
    for row in range(bs):
        for node in range(1, int(trees[3][row])):
            chosen[row, trees[1][row, node]] = trees[0][row, node]
    positions = torch.arange(bs) * 7 + 5
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs,), generator=generator)
    thresholds = torch.tensor([math.inf, -math.log(-math.log(0.5)), -math.log(-math.log(0.25)), -math.inf])
    rest = [tensor.to(device) for tensor in (chosen, positions, seeds, thresholds)]
    with reference_version():
        expected = synthetic_acceptance(*trees, *rest, VOCAB)
    guarded = [guards.put(tensor) for tensor in (*trees, *rest)]
    guarded[6:8] = [
        guards.put(tensor.repeat_interleave(stride))[::stride]
        for tensor, stride in zip(rest[1:3], (columns, 3), strict=True)
    ]
    with triton_version(guards):
        planted = synthetic_acceptance(*guarded, VOCAB)  # type: ignore[call-arg]
    assert torch.equal(planted, expected)
    walked = verify_tree(trees[0], trees[1], trees[3], planted)
    for row in range(bs):
        deepest = int(trees[2][row, : int(trees[3][row])].max())
        assert min(1, deepest) <= int(walked.num_accepted[row]) <= min(3, deepest)
        assert 0 <= int(walked.emitted[row, int(walked.num_accepted[row])]) < VOCAB


def check_packed_acceptance(device: str, bs: int, columns: int, guards: Guards) -> None:
    """Check that packed trees get the tokens that `synthetic_acceptance` chooses for the padded trees."""
    rng = random.Random(bs * 1000 + columns)
    trees = random_trees(bs, columns, rng)
    counts = trees[3].tolist()
    generator = torch.Generator().manual_seed(columns)
    chosen = torch.randint(0, VOCAB, (bs, columns), generator=generator)
    for row in range(bs):
        for node in range(1, counts[row]):
            chosen[row, trees[1][row, node]] = trees[0][row, node]
    positions = torch.randint(5, 99, (bs, columns), generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (bs, columns), generator=generator)
    thresholds = torch.tensor([math.inf, -math.log(-math.log(0.5)), -math.log(-math.log(0.25)), -math.inf])
    roots = (positions[:, 0].contiguous(), seeds[:, 0].contiguous())
    with reference_version():
        padded = synthetic_acceptance(*trees, chosen, *roots, thresholds, VOCAB)
    # Each entry has up to two rows more than nodes; a last entry has no rows. Three rows are padding.
    widths = [count + rng.choice([0, 0, 2]) for count in counts] + [0]
    starts = torch.tensor([sum(widths[:entry]) for entry in range(bs + 2)], dtype=torch.int32)
    rows = int(starts[-1]) + 3
    source = torch.full((rows,), -1)
    for row, count in enumerate(counts):
        source[int(starts[row]) : int(starts[row]) + count] = row * columns + torch.arange(count)

    def packed(field: torch.Tensor) -> torch.Tensor:
        """Return a field of the trees in packed rows, with noise in rows that belong to no node."""
        flat = field.flatten(0, 1)
        noise = torch.randint(0, VOCAB, (rows, *flat.shape[1:]), generator=generator).to(field.dtype)
        noise[source >= 0] = flat[source[source >= 0]]
        return noise

    nodes = torch.cat((trees[3], torch.ones(1, dtype=torch.int32)))
    fields = (*(packed(trees[index]) for index in (0, 1, 2, 4)), starts, nodes)
    arguments = (*fields, packed(chosen), packed(positions), packed(seeds), thresholds)
    expected = arguments[6].clone()
    expected[source >= 0] = padded.flatten()[source[source >= 0]]
    with reference_version():
        assert torch.equal(packed_acceptance(*arguments, VOCAB), expected)
    guarded = [guards.put(tensor.to(device)) for tensor in arguments]
    with triton_version(guards):
        planted = packed_acceptance(*guarded, VOCAB)  # type: ignore[call-arg]
    assert torch.equal(planted.cpu(), expected)
    assert columns < 6 or not torch.equal(expected, arguments[6]), "some trees must be cut"
