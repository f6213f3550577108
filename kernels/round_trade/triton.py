"""round_trade in Triton, one launch each; the contract is in the package's docstring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch


@triton.jit
def _admit(number, expected, counts, bs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    row = tl.arange(0, BLOCK)
    inside = row < bs
    comes = tl.load(number) == tl.load(expected)
    count = tl.load(counts + row, mask=inside, other=0)
    if PDL:
        gdc_launch_dependents()
    tl.store(counts + row, tl.where(comes, count, 0), mask=inside)


def admit_counts(number: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor) -> None:
    """See `outrider.kernels.round_trade.admit_counts`."""
    bs = counts.shape[0]
    if bs:
        with _launch.on_device_of(counts):
            _admit[(1,)](
                number, expected, counts, bs, BLOCK=_launch.next_power_of_2(bs), num_warps=1, **_launch.dependent(counts)
            )  # fmt: skip


@triton.jit
def _pack(num_nodes, tokens, parents, out_nodes, out_tokens, out_parents, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < columns
    at = row * columns + node
    nodes = tl.load(num_nodes + row)
    token = tl.load(tokens + at, mask=inside, other=0)
    parent = tl.load(parents + at, mask=inside, other=0)
    if PDL:
        gdc_launch_dependents()
    tl.store(out_nodes + row, nodes)
    tl.store(out_tokens + at, token, mask=inside)
    tl.store(out_parents + at, parent, mask=inside)


def pack_trees(
    num_nodes: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    out_nodes: torch.Tensor,
    out_tokens: torch.Tensor,
    out_parents: torch.Tensor,
) -> None:
    """See `outrider.kernels.round_trade.pack_trees`."""
    bs, columns = tokens.shape
    if bs:
        with _launch.on_device_of(tokens):
            _pack[(bs,)](
                num_nodes, tokens, parents, out_nodes, out_tokens, out_parents, columns,
                BLOCK=_launch.next_power_of_2(columns), num_warps=1, **_launch.dependent(tokens),
            )  # fmt: skip
