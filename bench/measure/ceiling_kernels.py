"""Triton kernels that measure two limits of a GPU: the read bandwidth, and the duration of an empty launch.

The kernel for the read bandwidth shows how fast weights can be streamed. It replaces torch's reductions,
because they read more slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
    """Read ``source [size] fp32`` once.

    Returns:
        One sum for each program. The sums keep the compiler from dropping the reads.
    """
    size = source.numel()
    programs = triton.cdiv(size, BLOCK * BLOCKS_PER_PROGRAM)
    sums = torch.empty(programs, dtype=torch.float32, device=source.device)
    _read[(programs,)](source, sums, size, BLOCK=BLOCK, BLOCKS=BLOCKS_PER_PROGRAM, num_warps=8)
    return sums


@triton.jit
def _nothing(x, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def launch_nothing(x: torch.Tensor) -> None:
    """Launch a kernel that ends immediately.

    If the GPU supports programmatic dependent launch, this option is used, as for the kernels of a round.
    """
    early = torch.cuda.get_device_capability(x.device) >= (9, 0)
    _nothing[(1,)](x, PDL=early, num_warps=1, **({"launch_pdl": True} if early else {}))
