"""Late programmatic dependent launch, and prefetching the next kernel's weights into L2.

Rules of every kernel that is launched so (Hopper and newer; switched off elsewhere, and under the interpreter):

1. `gdc_wait` comes before the first read or write of anything that another kernel touches. Only weights, which nobody writes, may be
   asked for earlier. Every program waits, also one with nothing to do: a kernel is then complete only after all kernels before it, so that
   the wait of the next one orders it behind all of them, not just behind its neighbour.
2. `gdc_launch_dependents` comes just before the last stores. Earlier, the next kernel's programs would take the resources that this
   one's still need (measured: slower).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from outrider.kernels.ahead import Prefetch


@triton.jit
def prefetch(weight, stride, count, size, program, programs, THREADS: tl.constexpr):
    """Ask for this program's share of `count` chunks of `size` bytes, `stride` elements apart, in L2. Returns at once."""
    for first in range(program * THREADS, count, programs * THREADS):
        chunk = first + tl.arange(0, THREADS)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, $3; @p cp.async.bulk.prefetch.L2.global [$1], $4; mov.u32 $0, 0; }",
            "=r,l,r,r,r",
            [weight + chunk.to(tl.int64) * stride, chunk, chunk * 0 + count, chunk * 0 + size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@functools.cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def launch_late(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel with a `PDL` parameter, for the device of its tensors."""
    if tensor.is_cuda and _capable(tensor.device.index or 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def prefetch_arguments(prefetch: Prefetch | None, spare: torch.Tensor, late: dict[str, Any]) -> tuple[torch.Tensor, int, int, int, bool]:
    """Return (weight, stride, count, size, whether to prefetch) for `prefetch`; `spare` stands in for a weight that is not given."""
    if prefetch is None or not late["PDL"] or prefetch.size == 0:
        return spare, 0, 0, 0, False
    weight = prefetch.weight
    return weight.view(-1)[prefetch.begin // weight.element_size() :], weight.shape[1], weight.shape[0], prefetch.size, True
