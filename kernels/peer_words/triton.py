"""Triton version of peer_words. `kernels.peer_words` documents the ops.

A word and its message number form one 64-bit element of a vector store. Each element is written atomically,
so a reader that sees the number also has the word. Memory operations between ranks are strong at system
scope: `.wt` stores and volatile loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch
from outrider.kernels.peer_words.types import BLOCK, TILES, Mail

_WARPS = 4


@triton.jit
def _send(
    words, addresses, turns, lost, rank, first, last, count, patience, absent,
    TILES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    lane = tl.arange(0, BLOCK)
    inside = tile * BLOCK + lane < count
    own_box = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    if PDL:
        gdc_wait()
    turn = tl.load(turns + rank * TILES + tile)
    gone = tl.load(lost) != 0
    looks = tl.where(gone, 1, patience)  # polls left, shared by all readers; one poll after a loss
    values = tl.load(words + tile * BLOCK + lane, mask=inside, other=0)
    values = tl.where(gone, absent, values)
    letters = (values.to(tl.int64) & 0xFFFFFFFF) | ((turn + 1).to(tl.int64) << 32)
    # Write to a reader's box only after its receipt for the previous message.
    for reader in range(first, last):
        receipt = own_box + (reader * TILES + tile) * (BLOCK + 1) + BLOCK
        missing = 1
        while (missing > 0) & (looks > 0):
            missing = (tl.load(receipt, volatile=True) != turn).to(tl.int32)
            looks -= 1
        if missing > 0:
            tl.store(lost, 1)
        box = tl.load(addresses + reader).to(tl.pointer_type(tl.int64))
        tl.store(box + (rank * TILES + tile) * (BLOCK + 1) + lane, letters, mask=inside, cache_modifier=".wt")
    tl.store(turns + rank * TILES + tile, turn + 1)


@triton.jit
def _receive(
    out, own, addresses, turns, lost, rank, first, count, patience, absent,
    TILES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(0)
    sender = first + tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    lane = tl.arange(0, BLOCK)
    inside = tile * BLOCK + lane < count
    own_box = tl.load(addresses + rank).to(tl.pointer_type(tl.int64))
    sender_box = tl.load(addresses + sender).to(tl.pointer_type(tl.int64))
    if PDL:
        gdc_wait()
    if sender != rank:
        turn = tl.load(turns + sender * TILES + tile) + 1
        gone = tl.load(lost)
        place = own_box + (sender * TILES + tile) * (BLOCK + 1)
        values = tl.zeros([BLOCK], tl.int32)
        # `missing` is 1 if words are missing, and 2 if words are missing and a rank is lost. 2 ends the
        # polling. The value is a maximum over all threads, because all threads must leave the loop together.
        missing = 1
        looks = patience
        while (missing == 1) & (looks > 0):
            letters = tl.load(place + lane, mask=inside, other=0, volatile=True)
            values = letters.to(tl.int32)
            missing = tl.max(tl.where(inside & ((letters >> 32) != turn), 1 + gone, 0), 0)
            looks -= 1
        if missing > 0:
            tl.store(lost, 1)
        values = tl.where((missing > 0) | (gone != 0), absent, values)
        tl.store(out + tl.program_id(1) * count + tile * BLOCK + lane, values, mask=inside)
        receipt = sender_box + (rank * TILES + tile) * (BLOCK + 1) + BLOCK
        tl.store(receipt, turn.to(tl.int64), cache_modifier=".wt")
        tl.store(turns + sender * TILES + tile, turn)
    else:
        values = tl.load(own + tile * BLOCK + lane, mask=inside, other=0)
        tl.store(out + tl.program_id(1) * count + tile * BLOCK + lane, values, mask=inside)


def send_words(words: torch.Tensor, mail: Mail, readers: range, missing: int) -> None:
    count = words.shape[0]
    if count == 0:
        return
    with _launch.on_device_of(words):
        _send[(_launch.ceil_div(count, BLOCK),)](
            words, mail.addresses, mail.turns, mail.lost, mail.rank, readers.start, readers.stop, count,
            mail.patience, missing,
            TILES=TILES, BLOCK=BLOCK, num_warps=_WARPS, **_launch.dependent(words),
        )  # fmt: skip


def receive_words(
    out: torch.Tensor, mail: Mail, senders: range, missing: int, own: torch.Tensor | None
) -> None:
    rows, count = out.shape
    if count == 0 or rows == 0:
        return
    with _launch.on_device_of(out):
        _receive[(_launch.ceil_div(count, BLOCK), rows)](
            out, out if own is None else own, mail.addresses, mail.turns, mail.lost,
            mail.rank, senders.start, count, mail.patience, missing,
            TILES=TILES, BLOCK=BLOCK, num_warps=_WARPS, **_launch.dependent(out),
        )  # fmt: skip
