"""Checks of round_plan, shared by interpreted tests on a CPU and compiled tests on a GPU."""

from __future__ import annotations

import torch
from guards import Guards, reference_version, triton_version

from outrider.kernels.round_plan import round_plan


def check_round_plan(
    device: str,
    bs: int,
    rows: int,
    depth: int,
    topk: int,
    page_size: int,
    lead: int,
    guards: Guards,
    behind: int = 0,
) -> None:
    """Compare with the reference, and the reference with the contract in plain Python, row by row."""
    generator = torch.Generator().manual_seed(bs * 100 + rows * 10 + depth)
    counts = (
        torch.tensor([rows, 0, 1, max(1, rows - 1), 2])[torch.arange(bs) % 5].clamp(max=rows).to(torch.int32)
    )
    committed = (torch.randint(0, 40, (bs,), generator=generator) + counts + 1).to(torch.int32)
    columns = rows + bs % 3
    tokens = torch.randint(0, 1000, (bs, columns), generator=generator, dtype=torch.int32)
    pages = -(-(int(committed.max()) + depth * topk + 1) // page_size)
    table = torch.randperm(bs * pages, generator=generator).view(bs, pages).to(torch.int32)
    nodes = torch.arange(bs, dtype=torch.int32) + 3
    arguments = [tensor.to(device) for tensor in (committed, counts, tokens, nodes, table)]
    sizes = {
        "rows": rows,
        "depth": depth,
        "topk": topk,
        "page_size": page_size,
        "lead": lead,
        "behind": behind,
    }
    with reference_version():
        expected = round_plan(*arguments, **sizes)
    with triton_version(guards):
        actual = round_plan(*(guards.put(argument) for argument in arguments), **sizes)
    for name, have, want in zip(expected._fields, actual, expected, strict=True):
        assert have.dtype == want.dtype, name
        assert have.tolist() == want.tolist(), name

    def slot(sequence: int, index: int) -> int:
        return int(table[sequence, index // page_size]) * page_size + index % page_size

    for b in range(bs):
        count, last = int(counts[b]), int(committed[b]) - 1 + lead - behind
        stable = max(0, last)
        extended = slice(b * rows, (b + 1) * rows)
        slots = expected.extend_slots[extended].tolist()
        assert slots[: rows - count] == [-1] * (rows - count)
        assert slots[rows - count :] == [
            slot(b, last - count + i) if last - count + i >= 0 else -1 for i in range(count)
        ]
        assert expected.tokens[extended].tolist()[rows - count :] == tokens[b, :count].tolist()
        assert expected.positions[extended].tolist()[rows - count :] == [
            max(0, last - count + i) for i in range(count)
        ]
        assert [row - b * columns for row in expected.features[extended].tolist()[rows - count :]] == list(
            range(count)
        )
        assert expected.max_nodes[b] == (nodes[b] if count else 1)
        if count:
            assert expected.root_tokens[b] == tokens[b, count - 1]
            assert expected.lens[:, b].tolist() == [
                max(0, last - count),
                *(stable + level * topk for level in range(depth)),
            ]
            for level in range(1, depth):
                row = slice(b * topk, (b + 1) * topk)
                wanted = [slot(b, stable + (level - 1) * topk + j) for j in range(topk)]
                assert expected.level_slots[level - 1, row].tolist() == wanted
                start = bs * rows + (level - 1) * bs * topk + b * topk
                assert expected.positions[start : start + topk].tolist() == [max(0, last - 1 + level)] * topk
        else:
            assert expected.lens[:, b].tolist() == [0] * (1 + depth)
            assert bool((expected.level_slots.view(depth - 1, bs, topk)[:, b] == -1).all())
