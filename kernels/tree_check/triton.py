"""Triton version of tree_check: one program per row. `kernels.tree_check` documents the op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch

WORD_BITS = 32


@triton.jit
def _check(
    number, expected, num_nodes, tokens, parents, fresh, fresh_stride, counts, out_tokens, out_parents,
    out_depths, out_nodes, out_masks, columns, words, vocab_size, depth, BLOCK: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    root = tl.load(
        fresh + row * fresh_stride + count - 1, mask=(count > 0) & (count <= fresh_stride), other=0
    )
    # 1. Check the header, tokens and parents.
    nodes = tl.load(num_nodes + row)
    fits = (tl.load(number) == tl.load(expected)) & (count > 0) & (nodes >= 1) & (nodes <= columns)
    node = tl.arange(0, BLOCK)
    inside = node < columns
    at = row * columns + node
    drafted = fits & (node >= 1) & (node < nodes)
    token = tl.load(tokens + at, mask=drafted, other=0)
    parent = tl.load(parents + at, mask=drafted, other=0)
    wrong = drafted & ((token < 0) | (token >= vocab_size) | (parent < 0) | (parent >= node))
    fits = fits & (tl.sum(wrong.to(tl.int32), axis=0) == 0)
    # 2. Walk up to the root. Every parent read here was checked above to precede its child.
    current = tl.where(drafted & fits, node, 0)
    word = tl.arange(0, WORDS)
    masks = tl.where(word[None, :] == (current // 32)[:, None], 1 << (current % 32)[:, None], 0)
    depths = tl.zeros((BLOCK,), dtype=tl.int32)
    for _ in range(depth):
        climbs = current > 0
        depths += climbs.to(tl.int32)
        current = tl.load(parents + row * columns + current, mask=climbs, other=0)
        masks |= tl.where(word[None, :] == (current // 32)[:, None], 1 << (current % 32)[:, None], 0)
    fits = fits & (tl.sum((current > 0).to(tl.int32), axis=0) == 0)
    drafted = drafted & fits
    # 3. Store the tree, or its root alone.
    if PDL:
        gdc_launch_dependents()
    tl.store(out_nodes + row, tl.where(fits, nodes, 1))
    tl.store(out_tokens + at, tl.where(node == 0, root, tl.where(drafted, token, 0)), mask=inside)
    tl.store(out_parents + at, tl.where(drafted, parent, -1), mask=inside)
    tl.store(out_depths + at, tl.where(drafted, depths, 0), mask=inside)
    real = drafted | (node == 0)
    only_root = tl.where(word == 0, 1, 0)[None, :]
    masks = tl.where(real[:, None], tl.where(drafted[:, None], masks, only_root), 0)
    tl.store(
        out_masks + at[:, None] * words + word[None, :], masks, mask=inside[:, None] & (word < words)[None, :]
    )


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
    (bs, columns), device = tokens.shape, tokens.device
    words = _launch.ceil_div(columns, WORD_BITS)
    planes = [_launch.empty((bs, columns), torch.int32, device) for _ in range(3)]
    nodes = _launch.empty((bs,), torch.int32, device)
    masks = _launch.empty((bs, columns, words), torch.int32, device)
    if bs:
        with _launch.on_device_of(tokens):
            _check[(bs,)](
                number, expected, num_nodes, tokens, parents, fresh, fresh.shape[1], counts, *planes, nodes,
                masks, columns, words, vocab_size, depth,
                BLOCK=_launch.next_power_of_2(columns), WORDS=_launch.next_power_of_2(words),
                num_warps=1 if columns <= 64 else 4, **_launch.dependent(tokens),
            )  # fmt: skip
    return (*planes, nodes, masks)
