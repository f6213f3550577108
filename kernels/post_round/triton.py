"""Triton version of post_round: one program, since a result has few words. The package documents the contract."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch


@triton.jit
def _post(packed, ring, turn, size, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    now = tl.load(turn)
    at = tl.arange(0, BLOCK)
    place = ring + now.to(tl.int64) * size
    for start in range(0, size, BLOCK):
        inside = start + at < size
        tl.store(place + start + at, tl.load(packed + start + at, mask=inside, other=0), mask=inside)
    if PDL:
        gdc_launch_dependents()
    tl.store(turn, (now + 1) % PLACES)


def post_round(packed: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    with _launch.on_device_of(packed):
        _post[(1,)](
            packed, ring, turn, packed.numel(), PLACES=ring.shape[0], BLOCK=1024, num_warps=4, **_launch.dependent(packed)
        )  # fmt: skip
