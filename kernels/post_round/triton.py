"""Triton version of post_round. `kernels.post_round` documents the op.

A round's result usually has few words. One program then copies it and advances the turn (the index of the
ring's next entry). A large result is copied by several programs. A second launch then advances the turn,
because all programs must read the turn first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch

_BLOCK = 1024
_SHARE = 4096  # words that a program copies


@triton.jit
def _post(
    packed, ring, turn, size, PLACES: tl.constexpr, ALONE: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_wait()
    now = tl.load(turn)
    at = tl.arange(0, BLOCK)
    place = ring + now.to(tl.int64) * size
    begin = tl.program_id(0) * SHARE
    for start in range(begin, tl.minimum(begin + SHARE, size), BLOCK):
        inside = start + at < size
        tl.store(place + start + at, tl.load(packed + start + at, mask=inside, other=0), mask=inside)
    if PDL:
        gdc_launch_dependents()
    if ALONE:
        tl.store(turn, (now + 1) % PLACES)


@triton.jit
def _advance(turn, PLACES: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    now = tl.load(turn)
    if PDL:
        gdc_launch_dependents()
    tl.store(turn, (now + 1) % PLACES)


def post_round(packed: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    size, places = packed.numel(), ring.shape[0]
    programs = max(1, _launch.ceil_div(size, _SHARE))
    options = {"num_warps": 4, **_launch.dependent(packed)}
    with _launch.on_device_of(packed):
        _post[(programs,)](
            packed, ring, turn, size, PLACES=places, ALONE=programs == 1, SHARE=_SHARE, BLOCK=_BLOCK,
            **options
        )  # fmt: skip
        if programs > 1:
            _advance[(1,)](turn, PLACES=places, **options)
