"""Cases of `outrider bench kernels` for the attention of long prompts, by our kernel and by the library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from outrider.bench.kernels.case import KernelCase, KernelOptions, over
from outrider.bench.kernels.inputs import AttentionInputs, KernelSizes, attention_inputs, copies_for, paged
from outrider.bench.measure.floors import Work
from outrider.kernels.merge_attention import merge_attention
from outrider.kernels.tree_attention import tree_attention
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.chunks import ChunkAttention
from outrider.shared.attn.library import cudnn_attention
from outrider.shared.attn.tiles import SIZES, shapes_of

CHUNKS = ((0, 2048), (0, 8192), (0, 32768), (7680, 8192), (24576, 32768), (5000, 13000))
"""Token indices of the first row and after the last row. The last chunk is aligned to no tile."""
SMALL_CHUNKS = ((0, 40), (30, 50))


def prefill_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield cases of one layer's attention for prompt chunks, and of merging two attention results.

    cuDNN's attention is measured for comparison, on a GPU only. Its plans are built before the measurement.
    """
    token = 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
    chunks = None
    if options.device.type == "cuda":
        chunks = ChunkAttention(
            cudnn_attention, shapes_of(SIZES[0]), SIZES[0], sizes.dtype, least_gain_us=float("-inf")
        )
    for start, stop in SMALL_CHUNKS if options.small else CHUNKS:
        rows = stop - start
        copies = copies_for(stop * token, options.small)
        planes = [paged(sizes, 1, stop) for _ in range(copies)]
        inputs = attention_inputs(sizes, 1, rows, start, is_tree=False)
        work = Work(stop * token, 4.0 * sizes.heads * sizes.head_dim * rows * (start + (rows + 1) / 2))
        name = f"last {rows} of {stop} tokens"
        yield KernelCase(f"tree_attention prompt, {name}", over(planes, partial(_own, inputs)), work, copies)
        if chunks is not None:
            call = over(planes, partial(_library, chunks, inputs, start, rows))
            yield KernelCase(f"cudnn_attention prompt, {name}", call, work, copies)
    yield _merge(sizes, options.small)


def _own(inputs: AttentionInputs, planes: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return tree_attention(*inputs.before(planes), **inputs.keywords)


def _library(
    chunks: ChunkAttention,
    inputs: AttentionInputs,
    start: int,
    rows: int,
    planes: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    table, prefixes, lengths, query_start, _ = inputs.rest
    batch = AttentionBatch(
        page_table=table,
        prefix_lens=prefixes,
        kv_lens=lengths,
        query_start=query_start,
        ancestors=None,
        slots=prefixes,  # not read
        max_query_len=rows,
        max_kv_len=start + rows,
        host_lens=((start, rows),),
    )
    out = chunks.attend(batch, inputs.q, *planes, inputs.keywords["scale"], _no_others)
    assert out is not None
    return out


def _no_others(first: int, last: int, out: torch.Tensor) -> None:
    """Do nothing: the only sequence is taken."""


def _merge(sizes: KernelSizes, small: bool) -> KernelCase:
    rows, heads, dim = 8 if small else SIZES[0], sizes.heads, sizes.head_dim
    parts = [sizes.random(rows, heads, dim) for _ in range(2)]
    scores = [torch.randn(rows, heads, device=sizes.device) for _ in range(2)]
    out = torch.empty_like(parts[0])
    call = partial(merge_attention, parts[0], scores[0], parts[1], scores[1], out=out)
    nbytes = 3 * parts[0].nbytes + 3 * scores[0].nbytes
    return KernelCase(f"merge_attention, {rows} rows", call, Work(nbytes, 0.0))
