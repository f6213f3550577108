"""Inner loop of `tree_attention`: adds tokens to the running softmax of (row, head of the group) pairs.

A group consists of the query heads that share a K/V head. The tensor core processes 64 rows of its left
operand at a time. The kernel has two forms:

- Normally, the rows of the left operand are the pairs.
- With TRANSPOSED, which is for few pairs, the rows of the left operand are token indices or head dimensions.
  The pairs are the narrow side of the right operand. Pairs are then not padded to 64, and scores and results
  take few registers. K and V move from shared memory to the tensor cores unchanged.

K and V that are stored in FP8 are widened after they are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold(
    query, begin, shared_end, end, pages, table, k_head, v_head, row, position, first_column, prefix_len,
    ancestors, words, window, scale, softcap,
    SLOT_STRIDE: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, TREE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Return each pair's maximum, sum of weights and weighted sum of values over the tokens [begin, end).

    Args:
        query: ``[BLOCK_M, BLOCK_D]``. With TRANSPOSED, the query and the weighted sum are
            ``[BLOCK_D, BLOCK_M]``.
        pages: Pages of the first step's token indices. Each step loads the pages of the next step, so that
            the next step's loads of K and V do not wait for page numbers.
        shared_end: Without WINDOW, all pairs see all indices below this end.
        scale: Positive factor that gives scores in units of log2. With SOFTCAP, scores are multiplied by this
            factor before the cap is applied.
    """
    d = tl.arange(0, BLOCK_D)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if TRANSPOSED:
        acc = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
    factor = scale
    if SOFTCAP:
        factor = 1.0
    for first in range(begin, end, BLOCK_N):
        index, inside, page = first + tl.arange(0, BLOCK_N), within(first, end, BLOCK_N), pages.to(tl.int64)
        pages = tl.load(table + within(first + BLOCK_N, end, BLOCK_N) // PAGE_SIZE)
        slot = (page * PAGE_SIZE + inside % PAGE_SIZE) * SLOT_STRIDE
        if DIM == BLOCK_D:
            k = tl.load(k_head + slot[:, None] + d[None, :])
            v = tl.load(v_head + slot[:, None] + d[None, :])
        else:
            k = tl.load(k_head + slot[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(v_head + slot[:, None] + d[None, :], mask=(d < DIM)[None, :], other=0.0)
        k, v = k.to(query.dtype), v.to(query.dtype)  # planes may be FP8
        scores = (
            tl.dot(k, query, input_precision="ieee")
            if TRANSPOSED
            else tl.dot(query, k.T, input_precision="ieee")
        )
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores) - 1.0)  # tanh
        if WINDOW or first + BLOCK_N > shared_end:
            if TRANSPOSED:
                visible = _visible(
                    index[:, None], first, end, row[None, :], position[None, :], first_column[None, :],
                    prefix_len, ancestors, words, window, TREE, WINDOW, BLOCK_N
                )  # fmt: skip
            else:
                visible = _visible(
                    index[None, :], first, end, row[:, None], position[:, None], first_column[:, None],
                    prefix_len, ancestors, words, window, TREE, WINDOW, BLOCK_N
                )  # fmt: skip
            scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 0 if TRANSPOSED else 1) * factor)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        fade = tl.exp2(top - base)
        if TRANSPOSED:
            weights = tl.exp2(scores * factor - base[None, :])
            total = total * fade[None, :] + weights  # summed over the tokens after the loop
            acc = tl.dot(v.T, weights.to(v.dtype), acc * fade[None, :], input_precision="ieee")
        else:
            weights = tl.exp2(scores * factor - base[:, None])
            total = total * fade + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = new_top
    return top, tl.sum(total, 0) if TRANSPOSED else total, acc


@triton.jit
def within(first, end, BLOCK_N: tl.constexpr):
    """Return the token indices of a step.

    Past the end, where weights are zero, the last index is repeated.
    """
    return tl.maximum(tl.minimum(first + tl.arange(0, BLOCK_N), end - 1), 0)


@triton.jit
def _visible(
    index, first, end, row, position, first_column, prefix_len, ancestors, words, window,
    TREE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Return which token indices each pair sees: `index` along one dimension, pairs along the other."""
    visible = index < end
    if TREE:
        column = index - prefix_len
        if WINDOW:
            visible = visible & (
                ((column < 0) & (index > position - window)) | ((column >= 0) & (column >= first_column))
            )
        column = tl.maximum(column, 0)
        base = tl.maximum(first - prefix_len, 0) // 32
        bits = tl.where(index < prefix_len, 1, 0)
        # The columns of a block are in at most this many words.
        for nth in tl.static_range((BLOCK_N + 31) // 32 + 1):
            word = tl.load(
                ancestors + row * words + base + nth, mask=(row >= 0) & (base + nth < words), other=0
            )
            bits |= tl.where(column // 32 == base + nth, (word >> (column % 32)) & 1, 0)
        visible = visible & (bits != 0)
    else:
        visible = visible & (index <= position)
        if WINDOW:
            visible = visible & (index > position - window)
    return visible


@triton.jit
def count_bits(word):
    """Return the number of set bits of a 32-bit word."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return (word + (word >> 16)) & 0x3F


@triton.jit
def first_column_of(ancestors, row, words, window):
    """Return the column of the window-th node from each path's end; earlier nodes are outside the window."""
    column = row.to(tl.int32) * 0
    if window < words * 32:  # no path is longer than its mask
        missing = column + window
        for index in range(words):
            word = tl.load(ancestors + row * words + (words - 1 - index), mask=row >= 0, other=0)
            nodes = count_bits(word)
            bit = column * 0  # the highest bit with at least `missing` nodes at and above it (binary search)
            for step in tl.static_range(5):
                higher = bit + (16 >> step)
                bit = tl.where(
                    count_bits((word >> higher) & (0x7FFFFFFF >> (higher - 1))) >= missing, higher, bit
                )
            column = tl.where((missing > 0) & (nodes >= missing), (words - 1 - index) * 32 + bit, column)
            missing -= nodes
    return column
