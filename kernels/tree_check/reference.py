"""Torch reference of tree_check. `kernels.tree_check` documents the op."""

from __future__ import annotations

import torch

from outrider.kernels._launch import ceil_div

WORD_BITS = 32


def tree_check(
    number: torch.Tensor,
    expected: torch.Tensor,
    num_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    fresh: torch.Tensor,
    counts: torch.Tensor,
    vocab_size: int,
    depth: int,
) -> tuple[torch.Tensor, ...]:
    bs, columns = tokens.shape
    node = torch.arange(columns, device=tokens.device, dtype=torch.int64)
    live = counts > 0
    last = (counts.to(torch.int64) - 1).clamp(0, fresh.shape[1] - 1)
    roots = torch.where(live, fresh.gather(1, last[:, None])[:, 0], 0)
    # 1. Check the header, tokens and parents.
    fits = (number == expected) & live & (num_nodes >= 1) & (num_nodes <= columns)
    drafted = fits[:, None] & (node >= 1) & (node < num_nodes[:, None])
    wrong = (tokens < 0) | (tokens >= vocab_size) | (parents < 0) | (parents >= node)
    fits = fits & ~(wrong & drafted).any(1)
    drafted = drafted & fits[:, None]
    # 2. Walk up to the root, collecting depths and ancestors.
    parent = torch.where(drafted, parents, 0).to(torch.int64)  # [bs, N]; the root is its own parent
    depths = torch.zeros_like(parent)
    seen = torch.zeros((bs, columns, columns), dtype=torch.bool, device=tokens.device)
    current = torch.where(drafted, node, 0)
    seen.scatter_(2, current[:, :, None], True)
    for _ in range(depth):
        depths += current > 0
        current = parent.gather(1, current)
        seen.scatter_(2, current[:, :, None], True)
    fits = fits & (current == 0).all(1)
    drafted = drafted & fits[:, None]
    # 3. Pack the ancestors into words.
    real = drafted | (node == 0)
    words = ceil_div(columns, WORD_BITS)
    bits = torch.zeros((bs, columns, words * WORD_BITS), dtype=torch.int64, device=tokens.device)
    bits[:, :, :columns] = seen & torch.where(drafted[:, :, None], True, node == 0) & real[:, :, None]
    weights = torch.ones(WORD_BITS, dtype=torch.int64, device=tokens.device) << torch.arange(
        WORD_BITS, device=tokens.device
    )
    packed = (bits.view(bs, columns, words, WORD_BITS) * weights).sum(3)
    ancestors = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    out_tokens = torch.where(drafted, tokens, 0)
    out_tokens[:, 0] = roots
    out_parents = torch.where(drafted, parents, -1)
    return (
        out_tokens.to(torch.int32),
        out_parents.to(torch.int32),
        torch.where(drafted, depths, 0).to(torch.int32),
        torch.where(fits, num_nodes, 1).to(torch.int32),
        ancestors,
    )
