"""Triton version of round_trade: one launch per function. `kernels.round_trade` documents the ops."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels import _launch

WORDS_PER_PROGRAM = 2048


@triton.jit(do_not_specialize=["number", "words"])
def _post(blob, slot, number, words, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    place = tl.multiple_of(slot.to(tl.pointer_type(tl.int32)), 16)
    word = tl.load(blob + at, mask=inside, other=0)
    tl.store(place + at, tl.where(at == 0, number, word), mask=inside)


@triton.jit(do_not_specialize=["number", "words"])
def _fetch(slot, blob, passed, number, words, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    place = tl.multiple_of(slot.to(tl.pointer_type(tl.int32)), 16)
    # Bypass the caches of the multiprocessors: another process may have written the slot since the last read.
    word = tl.load(place + at, mask=inside, other=0, cache_modifier=".cg")
    tl.store(blob + at, word, mask=inside)
    if program == 0:
        tl.store(passed.to(tl.pointer_type(tl.int32)), number)


def post_blob(blob: torch.Tensor, slot: int, number: int) -> None:
    words = blob.view(torch.int32)
    with _launch.on_device_of(blob):
        _post[(_launch.ceil_div(words.shape[0], WORDS_PER_PROGRAM),)](
            words, slot, number, words.shape[0], BLOCK=WORDS_PER_PROGRAM, num_warps=8,
            **_launch.dependent(blob)
        )  # fmt: skip


def fetch_blob(slot: int, blob: torch.Tensor, passed: int, number: int) -> None:
    words = blob.view(torch.int32)
    with _launch.on_device_of(blob):
        _fetch[(_launch.ceil_div(words.shape[0], WORDS_PER_PROGRAM),)](
            slot, words, passed, number, words.shape[0], BLOCK=WORDS_PER_PROGRAM, num_warps=8
        )  # fmt: skip


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
    bs = counts.shape[0]
    if bs:
        with _launch.on_device_of(counts):
            _admit[(1,)](
                number, expected, counts, bs, BLOCK=_launch.next_power_of_2(bs), num_warps=1,
                **_launch.dependent(counts)
            )  # fmt: skip


@triton.jit
def _pack(
    num_nodes,
    tokens,
    parents,
    out_nodes,
    out_tokens,
    out_parents,
    columns,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
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
    bs, columns = tokens.shape
    if bs:
        with _launch.on_device_of(tokens):
            _pack[(bs,)](
                num_nodes, tokens, parents, out_nodes, out_tokens, out_parents, columns,
                BLOCK=_launch.next_power_of_2(columns), num_warps=1, **_launch.dependent(tokens),
            )  # fmt: skip
