"""A kernel that only reads: the bandwidth that weights can be streamed at. torch's reductions do not reach it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 8192
BLOCKS_PER_PROGRAM = 8


@triton.jit
def _read(source, sums, size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(BLOCKS):
        at = (program * BLOCKS + index) * BLOCK + lane
        total += tl.load(source + at, mask=at < size, other=0.0, eviction_policy="evict_first")
    tl.store(sums + program, tl.sum(total, 0))


def read_all(source: torch.Tensor) -> torch.Tensor:
    """Read ``source [size] fp32`` once; returns a sum per program, so that no read can be left out."""
    size = source.numel()
    programs = triton.cdiv(size, BLOCK * BLOCKS_PER_PROGRAM)
    sums = torch.empty(programs, dtype=torch.float32, device=source.device)
    _read[(programs,)](source, sums, size, BLOCK=BLOCK, BLOCKS=BLOCKS_PER_PROGRAM, num_warps=8)
    return sums
