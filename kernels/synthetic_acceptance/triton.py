"""Triton version of synthetic_acceptance: one program per row. The package documents the contract."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.synthetic_acceptance.reference import NOISE_CHOICE


@triton.jit
def _plant(
    tokens, parents, depths, num_nodes, ancestors, chosen, positions, position_stride, seeds, seed_stride, thresholds, out, columns, words,
    levels, vocab_size, CHOICE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < columns
    at = row * columns + node
    token = tl.load(tokens + at, mask=inside, other=-1)
    parent = tl.load(parents + at, mask=inside, other=-1)
    depth = tl.load(depths + at, mask=inside, other=-1)
    after = tl.load(chosen + at, mask=inside, other=-1)
    real = inside & (node < tl.load(num_nodes + row))
    level = tl.arange(0, LEVELS)
    threshold = tl.load(thresholds + level, mask=level < levels, other=-float("inf"))
    # 1. Draw the number of accepted drafts, at most the depth of the tree.
    lane = level * 0  # token id 0
    noise = gumbel(
        tl.load(seeds + row * seed_stride),
        tl.load(positions + row * position_stride),
        tl.sum(lane, 0) + CHOICE,
        lane,
    )
    drawn = tl.sum((noise < threshold).to(tl.int32), 0)
    accepted = tl.minimum(drawn, tl.max(tl.where(real, depth, 0), 0))
    # 2. Find the path's end and the nodes on the path.
    end = tl.min(tl.where(real & (depth == accepted), node, BLOCK), 0)
    bits = tl.load(ancestors + (row * columns + end) * words + node // 32, mask=inside, other=0)
    on_path = real & (((bits >> (node % 32)) & 1) == 1)
    # 3. Choose a bonus token that no child carries.
    child = real & (parent == end)
    bonus = tl.sum(tl.where(node == end, after, 0), 0).to(tl.int32)
    while tl.max((child & (token == bonus)).to(tl.int32), 0) > 0:
        bonus = (bonus + 1) % vocab_size
    # 4. Store. The two stores write different elements. A node on the path, except the last, receives its
    # child's token, which the child stores at its parent's index.
    kept = tl.where(node == end, bonus.to(tl.int64), after)
    tl.store(out + at, kept, mask=inside & ((node == end) | (on_path == 0)))
    tl.store(out + row * columns + parent, token.to(tl.int64), mask=on_path & (node > 0))


def synthetic_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    num_nodes: torch.Tensor,
    ancestors: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    bs, columns = tokens.shape
    out = _launch.empty((bs, columns), torch.int64, tokens.device)
    if bs:
        with _launch.on_device_of(tokens):
            _plant[(bs,)](
                tokens.contiguous(), parents.contiguous(), depths.contiguous(), num_nodes.contiguous(), ancestors.contiguous(),
                chosen.contiguous(), positions, positions.stride(0), seeds, seeds.stride(0), thresholds.contiguous(), out, columns,
                ancestors.shape[2], thresholds.shape[0], vocab_size, CHOICE=NOISE_CHOICE, BLOCK=_launch.next_power_of_2(columns),
                LEVELS=max(2, _launch.next_power_of_2(thresholds.shape[0])), num_warps=4,
            )  # fmt: skip
    return out
