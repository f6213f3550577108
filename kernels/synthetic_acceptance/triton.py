"""Triton version of synthetic_acceptance: one program per tree.

`kernels.synthetic_acceptance` documents the ops.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels import _launch
from outrider.kernels.philox.triton import gumbel
from outrider.kernels.synthetic_acceptance.reference import NOISE_CHOICE


@triton.jit
def _plant(
    tokens, parents, depths, num_nodes, ancestors, chosen, positions, position_stride, seeds, seed_stride,
    thresholds, out, columns, words, levels, vocab_size, CHOICE: tl.constexpr, BLOCK: tl.constexpr,
    LEVELS: tl.constexpr
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
                tokens.contiguous(), parents.contiguous(), depths.contiguous(), num_nodes.contiguous(),
                ancestors.contiguous(), chosen.contiguous(), positions, positions.stride(0), seeds,
                seeds.stride(0), thresholds.contiguous(), out, columns, ancestors.shape[2],
                thresholds.shape[0], vocab_size, CHOICE=NOISE_CHOICE, BLOCK=_launch.next_power_of_2(columns),
                LEVELS=max(2, _launch.next_power_of_2(thresholds.shape[0])), num_warps=4,
            )  # fmt: skip
    return out


_PACKED_BLOCK = 64  # nodes that a program of `packed_acceptance` visits at a time


@triton.jit(do_not_specialize=["trees", "rows", "words"])
def _plant_packed(
    tokens, parents, depths, ancestors, starts, num_nodes, chosen, positions, seeds, thresholds, out, trees,
    rows, words, levels, vocab_size, CHOICE: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    tree = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    if (tree < rows) & (tree >= tl.load(starts + trees)):
        # The program's number is also the number of a row behind all trees.
        tl.store(out + tree, tl.load(chosen + tree))
    if tree < trees:
        start = tl.load(starts + tree)
        width = tl.load(starts + tree + 1) - start
        nodes = tl.load(num_nodes + tree)
        real = tl.where(nodes > 1, nodes, 0)  # a root alone keeps its token
        # 1. Draw the number of accepted drafts, at most the depth of the tree.
        deepest = 0
        for first in range(0, real, BLOCK):
            node = first + offset
            depth = tl.load(depths + start + node, mask=node < real, other=0)
            deepest = tl.maximum(deepest, tl.max(depth, 0))
        level = tl.arange(0, LEVELS)
        threshold = tl.load(thresholds + level, mask=level < levels, other=-float("inf"))
        lane = level * 0  # token id 0
        seed = tl.load(seeds + start, mask=real > 0, other=0)
        position = tl.load(positions + start, mask=real > 0, other=0)
        noise = gumbel(seed, position, tl.sum(lane, 0) + CHOICE, lane)
        accepted = tl.minimum(tl.sum((noise < threshold).to(tl.int32), 0), deepest)
        # 2. Find the path's end.
        end = real
        for first in range(0, real, BLOCK):
            node = first + offset
            depth = tl.load(depths + start + node, mask=node < real, other=-1)
            end = tl.minimum(end, tl.min(tl.where(depth == accepted, node, real), 0))
        # 3. Choose a bonus token that no child carries.
        bonus = tl.load(chosen + start + end, mask=real > 0, other=-1).to(tl.int32)
        carried = real
        while carried > 0:
            carried = tl.minimum(carried, 0)
            for first in range(0, real, BLOCK):
                node = first + offset
                token = tl.load(tokens + start + node, mask=node < real, other=-1)
                parent = tl.load(parents + start + node, mask=node < real, other=-1)
                child = (node < real) & (parent == end) & (token == bonus)
                carried = tl.maximum(carried, tl.max(child.to(tl.int32), 0))
            bonus = tl.where(carried > 0, (bonus + 1) % vocab_size, bonus)
        # 4. Store, as `_plant` does.
        for first in range(0, width, BLOCK):
            node = first + offset
            row = start + node
            inside = node < real
            token = tl.load(tokens + row, mask=inside, other=-1)
            parent = tl.load(parents + row, mask=inside, other=-1)
            bits = tl.load(ancestors + (start + end) * words + node // 32, mask=inside, other=0)
            on_path = inside & (((bits >> (node % 32)) & 1) == 1)
            after = tl.load(chosen + row, mask=node < width, other=-1)
            kept = tl.where(inside & (node == end), bonus.to(tl.int64), after)
            tl.store(out + row, kept, mask=(node < width) & ((node == end) | (on_path == 0)))
            tl.store(out + start + parent, token.to(tl.int64), mask=on_path & (node > 0))


def packed_acceptance(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    starts: torch.Tensor,
    num_nodes: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    thresholds: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    rows, trees = tokens.shape[0], num_nodes.shape[0]
    out = _launch.empty((rows,), torch.int64, tokens.device)
    if rows:
        with _launch.on_device_of(tokens):
            _plant_packed[(max(rows, trees),)](
                tokens, parents, depths, ancestors.contiguous(), starts, num_nodes, chosen.contiguous(),
                positions.contiguous(), seeds.contiguous(), thresholds.contiguous(), out, trees, rows,
                ancestors.shape[1], thresholds.shape[0], vocab_size,
                CHOICE=NOISE_CHOICE, BLOCK=_PACKED_BLOCK,
                LEVELS=max(2, _launch.next_power_of_2(thresholds.shape[0])), num_warps=1,
            )  # fmt: skip
    return out
