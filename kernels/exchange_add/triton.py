"""Triton version of exchange_add. `kernels.exchange_add` documents the op.

A program handles a block of columns of one row. It polls until none of its elements contains the reserved
word for "empty". The order of stores therefore does not matter. Stores only have to become visible to the
other ranks. `.wt` stores and volatile loads ensure this, because they are strong at system scope.

This launch releases the next kernel immediately, so that the next kernel can load its weights during the
exchange. The programs of this launch are few, small and already resident, so the next kernel cannot displace
them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.exchange_add.types import ABSENT, BLOCK, Boxes
from outrider.kernels.stream import ResidualStream

_ABSENT = tl.constexpr(ABSENT)
_ABSENT_HALF = tl.constexpr(-0x8000)
_WARPS = 2


@triton.jit
def _exchange_rows(
    parts, residual, bias, norm_weight, out, scaled, sums, addresses, slots, lost, rank, rows, width, tiles,
    residual_row, out_row, patience,
    RANKS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
    word: tl.constexpr = tl.int32 if WIDE else tl.int16
    absent: tl.constexpr = _ABSENT if WIDE else _ABSENT_HALF
    lane = tl.arange(0, BLOCK)
    column = block * BLOCK + lane
    inside = column < width
    norm = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    own_inbox = tl.load(addresses + rank)
    tile = row * tl.num_programs(0) + block
    if PDL:
        gdc_wait()
    slot = tl.load(slots + tile)
    gone = tl.load(lost)
    own = tl.load(parts + row * width + column, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        own += tl.load(parts + (split * rows + row) * width + column, mask=inside, other=0.0).to(tl.float32)
    own_words = own.to(parts.dtype.element_ty).to(word, bitcast=True)
    own_words = tl.where(own_words == absent, 0, own_words)
    first = slot.to(tl.int64) * RANKS * tiles + tile  # rank 0's tile in this slot
    # 1. Send: write this rank's numbers into every inbox, its own included.
    for peer in tl.static_range(RANKS):
        place = tl.load(addresses + peer) + (first + rank * tiles) * (BLOCK * 4)
        pointer = tl.multiple_of(place.to(tl.pointer_type(word)), 16)
        tl.store(pointer + lane, own_words, mask=inside, cache_modifier=".wt")
    before = tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        before += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)

    # 2. Receive: poll this rank's inbox until the numbers of all ranks are there.
    total = tl.zeros([BLOCK], tl.float32)
    # `missing` is 1 if numbers are missing, and 2 if numbers are missing and a rank is lost. 2 ends the
    # polling. The value is a maximum over all threads, because all threads must leave the loop together.
    missing = 1
    looks = patience
    while (missing == 1) & (looks > 0):
        total = tl.zeros([BLOCK], tl.float32)
        wanting = tl.zeros([BLOCK], tl.int32)
        for sender in tl.static_range(RANKS):
            place = own_inbox + (first + sender * tiles) * (BLOCK * 4)
            pointer = tl.multiple_of(place.to(tl.pointer_type(word)), 16)
            words = tl.load(pointer + lane, mask=inside, other=0, volatile=True)
            wanting = tl.where(words == absent, 1 + gone, wanting)
            total += words.to(parts.dtype.element_ty, bitcast=True).to(tl.float32)
        missing = tl.max(wanting, 0)
        looks -= 1
    if missing > 0:
        total += float("nan")
        tl.store(lost, 1)

    # 3. Store the results, then empty the slot for its next use.
    kept = (before + total).to(scaled.dtype.element_ty)
    after = kept.to(tl.float32)
    tl.store(out + row * out_row + column, kept, mask=inside)
    tl.store(scaled + row * width + column, (after * norm).to(scaled.dtype.element_ty), mask=inside)
    tl.store(sums + block * rows + row, tl.sum(after * after, 0))
    for sender in tl.static_range(RANKS):
        place = own_inbox + (first + sender * tiles) * (BLOCK * 4)
        pointer = tl.multiple_of(place.to(tl.pointer_type(word)), 16)
        tl.store(pointer + lane, tl.full([BLOCK], absent, word), mask=inside)
    tl.store(slots + tile, 1 - slot)


def exchange_add(
    parts: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, boxes: Boxes,
    bias: torch.Tensor | None, out: torch.Tensor | None
) -> ResidualStream:  # fmt: skip
    rows, width = residual.shape
    blocks = _launch.ceil_div(width, BLOCK)
    total = _launch.empty((rows, width), residual.dtype, residual.device) if out is None else out
    scaled = _launch.empty((rows, width), residual.dtype, residual.device)
    sums = _launch.empty((blocks, rows), torch.float32, residual.device)
    stream = ResidualStream(total, scaled, sums, eps)
    if rows == 0:
        return stream
    residual = residual if residual.stride(1) == 1 else residual.contiguous()
    with _launch.on_device_of(residual):
        _exchange_rows[(blocks, rows)](
            parts, residual, norm_weight if bias is None else bias, norm_weight, total, scaled, sums,
            boxes.addresses, boxes.slots, boxes.lost, boxes.rank, rows, width, boxes.tiles,
            residual.stride(0), total.stride(0), boxes.patience,
            RANKS=boxes.ranks, SPLITS=parts.shape[0] if parts.dim() == 3 else 1, BIAS=bias is not None,
            WIDE=parts.dtype.itemsize == 4, BLOCK=BLOCK, num_warps=_WARPS, **_launch.dependent(residual),
        )  # fmt: skip
    return stream
