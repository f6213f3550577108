"""Triton version of tree_build: one program per sequence. `kernels.tree_build` documents the op.

A running count over the kept candidates numbers the nodes. Candidates are in level order, so parents get
lower numbers than children. Threads exchange these numbers through memory, which requires a barrier. A
program uses a single warp if its registers are enough, because a warp computes the count in one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels._order.triton import NO_SHORT_KEY, ordered_bits
from outrider.kernels.tree_build.types import DraftTreeTensors

_WORD_BITS = 32
_COUNTED = 128
"""Largest number of candidates for which each candidate is compared with all others to find its rank.

For more candidates, a bitwise search is used. For 68 candidates, the comparison took 3.8 µs and the search
5.7 µs. For 264 candidates, the comparison took 17.7 µs and the search 10.3 µs."""


# These numbers follow the shapes of trees, which clients choose.
@triton.jit(
    do_not_specialize=[
        *("score_stride", "token_stride", "parent_stride", "logprob_stride"),
        *("total", "columns", "words"),
    ]
)
def _build(
    scores, score_stride, tokens, token_stride, parents, parent_stride, logprobs, logprob_stride, root_tokens,
    max_nodes, numbers, out_tokens, out_parents, out_depths, out_num_nodes, out_ancestors, out_candidates,
    out_logprobs, total, columns, words,
    LOGPROBS: tl.constexpr, COUNTED: tl.constexpr, UNROLL: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK_C)
    inside = candidate < total
    score = tl.load(scores + row * score_stride + candidate, mask=inside, other=-float("inf"))
    valid = inside & (score > -float("inf"))  # false for NaN too
    budget = tl.minimum(tl.minimum(tl.load(max_nodes + row), columns) - 1, tl.sum(valid.to(tl.int32), 0))
    # 1. Select the candidates.
    if COUNTED:
        # For each candidate, count the candidates that rank above it. Unlike a search for repeated maxima,
        # this count needs no waiting between threads.
        above_it = tl.zeros((BLOCK_C,), tl.int32)
        for start in range(0, total, UNROLL):
            for i in tl.static_range(UNROLL):
                other = tl.load(
                    scores + row * score_stride + start + i, mask=start + i < total, other=-float("inf")
                )
                above_it += ((other > score) | ((other == score) & (start + i < candidate))).to(tl.int32)
        kept = valid & (above_it < budget)
    else:
        # Find the lowest kept score bit by bit: the greatest number x such that at least `budget` scores are
        # >= x.
        order = tl.where(valid, ordered_bits(score), NO_SHORT_KEY)
        least = tl.where(tl.sum((order >= 0).to(tl.int32), 0) >= budget, 0, NO_SHORT_KEY)
        for i in tl.static_range(31):
            higher = least | (1 << (30 - i))
            least = tl.where(tl.sum((order >= higher).to(tl.int32), 0) >= budget, higher, least)
        equal = (valid & (order == least)).to(tl.int32)
        room = budget - tl.sum((order > least).to(tl.int32), 0)
        kept = valid & ((order > least) | ((equal > 0) & (tl.cumsum(equal, 0) <= room)))
    # 2. Number the kept candidates, from 1 on: node 0 is the root.
    number = tl.where(kept, tl.cumsum(kept.to(tl.int32), 0), -1)
    tl.store(numbers + row * total + candidate, number, mask=inside)
    tl.store(out_candidates + row * columns + number, candidate, mask=kept)
    root_token = tl.load(root_tokens + row)
    tl.debug_barrier()  # the lookups below read values that other threads stored
    # 3. Look up the candidate of each node. From here on, each lane handles one node.
    num_nodes = tl.maximum(budget, 0) + 1
    node = tl.arange(0, BLOCK_N)
    column = node < columns
    drafted = (node > 0) & (node < num_nodes)
    at = row * columns + node
    chosen = tl.load(out_candidates + at, mask=drafted, other=-1)
    token = tl.load(tokens + row * token_stride + chosen, mask=drafted, other=0)
    above = tl.load(parents + row * parent_stride + chosen, mask=drafted, other=-1)
    if LOGPROBS:
        logprob = tl.load(logprobs + row * logprob_stride + chosen, mask=drafted, other=0.0)
    parent = tl.load(numbers + row * total + above, mask=drafted & (above >= 0), other=0)
    parent = tl.where(drafted, parent, -1)
    # 4. Walk from all nodes to the root in parallel, collecting ancestor bits and depths.
    word = tl.arange(0, BLOCK_W)
    climber = tl.where(node < num_nodes, node, -1)
    depth = tl.full((BLOCK_N,), -1, tl.int32)
    bits = tl.zeros((BLOCK_N, BLOCK_W), tl.int32)
    while tl.max(climber, 0) >= 0:
        climbing = climber >= 0
        depth += climbing.to(tl.int32)
        here = climbing[:, None] & ((climber // 32)[:, None] == word[None, :])
        bits |= tl.where(here, (tl.full((BLOCK_N,), 1, tl.int32) << (climber & 31))[:, None], 0)
        climber = tl.where(climbing, tl.gather(parent, tl.maximum(climber, 0), 0), -1)
    if PDL:
        gdc_launch_dependents()
    tl.store(out_num_nodes + row, num_nodes)
    tl.store(out_tokens + at, tl.where(node == 0, root_token, token), mask=column)
    tl.store(out_parents + at, parent, mask=column)
    tl.store(out_candidates + at, chosen, mask=column)
    if LOGPROBS:
        tl.store(out_logprobs + at, logprob, mask=column)
    tl.store(out_depths + at, tl.maximum(depth, 0), mask=column)
    tl.store(
        out_ancestors + at[:, None] * words + word[None, :],
        bits,
        mask=column[:, None] & (word < words)[None, :],
    )


def tree_build(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    root_tokens: torch.Tensor,
    max_nodes: torch.Tensor,
    num_columns: int,
    logprobs: torch.Tensor | None,
) -> DraftTreeTensors:
    bs, total = scores.shape
    device = scores.device
    words = _launch.ceil_div(num_columns, _WORD_BITS)
    given = scores if logprobs is None else logprobs
    scores, tokens, parents, given = (
        table if table.stride(1) == 1 else table.contiguous() for table in (scores, tokens, parents, given)
    )

    def integers(*shape: int) -> torch.Tensor:
        return _launch.empty(shape, torch.int32, device)

    tree = DraftTreeTensors(
        tokens=integers(bs, num_columns),
        parents=integers(bs, num_columns),
        depths=integers(bs, num_columns),
        num_nodes=integers(bs),
        ancestors=integers(bs, num_columns, words),
        candidates=integers(bs, num_columns),
        logprobs=None if logprobs is None else _launch.empty((bs, num_columns), torch.float32, device),
    )
    if bs:
        block = _launch.lanes(total)
        with _launch.on_device_of(scores):
            _build[(bs,)](
                scores, scores.stride(0), tokens, tokens.stride(0), parents, parents.stride(0), given,
                given.stride(0), root_tokens.contiguous(), max_nodes.contiguous(), integers(bs, total),
                tree.tokens, tree.parents, tree.depths, tree.num_nodes, tree.ancestors, tree.candidates,
                given if tree.logprobs is None else tree.logprobs, total, num_columns, words,
                LOGPROBS=logprobs is not None, COUNTED=total <= _COUNTED, UNROLL=8, BLOCK_C=block,
                BLOCK_N=_launch.lanes(num_columns), BLOCK_W=_launch.next_power_of_2(words),
                num_warps=8 if block > 1024 else 1, **_launch.dependent(scores),
            )  # fmt: skip
    return tree
