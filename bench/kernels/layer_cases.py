"""Cases of `outrider bench kernels` for decoder layers: norms, products and RoPE, in 16 bits and in FP8.

The module also contains cases for the batch-invariant kernels, which the flag `--deterministic` selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from outrider.bench.kernels.case import EPS, KernelCase, KernelOptions, over, small_kernel
from outrider.bench.kernels.inputs import KernelSizes, attention_inputs, copies_for, paged
from outrider.bench.measure.floors import Work
from outrider.kernels.add_norm import add_sums, embed_rows, normalise, rms_norm
from outrider.kernels.exchange_add import Boxes, exchange_add, inbox_shape
from outrider.kernels.invariant_gemm import invariant_gemm
from outrider.kernels.path_attention import RowPaths, path_attention, row_paths
from outrider.kernels.quantize_rows import quantize_rows
from outrider.kernels.rope_store import rope_angles, rope_store
from outrider.kernels.row_norm import row_norm
from outrider.kernels.silu_mul import silu_mul
from outrider.kernels.skinny_gemm import Rotary, project, project_add, project_gated, project_rotated
from outrider.shared.nn.fused.trial import Weight

ROPE_BASE = 500_000.0
EMBEDDED = 32_768
"""Rows of the embedding table that the case reads. No cache holds this many rows."""
PATIENCE = 1000
"""Maximum number of polls for a message. The message has already arrived, because there is one rank."""


def norm_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the norm kernels, each with the addition that is fused into it."""
    weight = sizes.random(sizes.hidden)
    table = sizes.random(min(sizes.vocab, EMBEDDED), sizes.hidden)
    for rows in sizes.rows:
        x, parts = sizes.random(rows, sizes.hidden), sizes.random(rows, sizes.hidden)
        tokens = torch.randint(0, table.shape[0], (rows,), device=sizes.device)
        stream = add_sums(parts, x, weight, EPS)
        yield small_kernel(f"rms_norm, {rows} rows", partial(rms_norm, x, weight, EPS))
        yield small_kernel(f"add_sums, {rows} rows", partial(add_sums, parts, x, weight, EPS))
        yield small_kernel(f"normalise, {rows} rows", partial(normalise, stream))
        yield small_kernel(f"embed_rows, {rows} rows", partial(embed_rows, tokens, table, weight, EPS))
    boxes = Boxes.of(
        0, [torch.empty(inbox_shape(1, sizes.hidden), dtype=torch.int32, device=sizes.device)], PATIENCE
    )
    parts, x = sizes.random(1, sizes.hidden), sizes.random(1, sizes.hidden)
    yield small_kernel("exchange_add with itself, 1 row", partial(exchange_add, parts, x, weight, EPS, boxes))


def layer_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the kernels between a layer's products. Models without fused products use these kernels."""
    frequencies = ROPE_BASE ** -torch.linspace(0, 1, sizes.head_dim, device=sizes.device)
    for rows in sizes.rows:
        positions = torch.arange(rows, device=sizes.device)
        cos, sin = rope_angles(positions, frequencies, 1.0, sizes.dtype)
        k_plane, v_plane = paged(sizes, 1, rows)
        qkv = sizes.random(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
        gates = sizes.random(rows, 2 * sizes.intermediate)
        yield small_kernel(
            f"rope_angles, {rows} rows", partial(rope_angles, positions, frequencies, 1.0, sizes.dtype)
        )
        yield small_kernel(
            f"rope_store, {rows} rows", partial(rope_store, qkv, cos, sin, k_plane, v_plane, positions)
        )
        yield small_kernel(f"silu_mul, {rows} rows", partial(silu_mul, gates))


def product_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the products as the engine calls them, with fused norm, RoPE, K/V store and SwiGLU."""
    for rows in sizes.rows:
        yield from _products(
            sizes, rows, options.small, lambda out, width: (sizes.random(out, width) * width**-0.5, None), ""
        )


def fp8_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the quantization of rows, and the products with FP8 matrices."""

    def weight(out: int, width: int) -> Weight:
        return (sizes.random(out, width) * width**-0.5).to(torch.float8_e4m3fn), torch.ones(
            out, device=sizes.device
        )

    for rows in (1, sizes.nodes):
        x = sizes.random(rows, sizes.hidden)
        yield small_kernel(f"quantize_rows, {rows} rows", partial(quantize_rows, x))
        yield from _products(sizes, rows, options.small, weight, " FP8")


def _products(
    sizes: KernelSizes, rows: int, small: bool, weight: Callable[[int, int], Weight], label: str
) -> Iterator[KernelCase]:
    """Yield every matrix product of the target for this number of rows."""
    residual, norm = sizes.random(rows, sizes.hidden), sizes.random(sizes.hidden)
    stream = add_sums(residual, residual, norm, EPS)
    frequencies = ROPE_BASE ** -torch.linspace(0, 1, sizes.head_dim, device=sizes.device)
    slots = torch.arange(rows, device=sizes.device)
    rotary = Rotary(*rope_angles(slots, frequencies, 1.0, sizes.dtype), *paged(sizes, 1, rows), slots)
    calls: dict[str, tuple[str, Callable[[torch.Tensor, Weight], object]]] = {
        "qkv": ("project_rotated", lambda _x, one: project_rotated(stream, one[0], rotary, scales=one[1])),
        "o": ("project_add", lambda x, one: project_add(x, one[0], residual, norm, EPS, scales=one[1])),
        "gate_up": ("project_gated", lambda _x, one: project_gated(stream, one[0], scales=one[1])),
        "down": ("project_add", lambda x, one: project_add(x, one[0], residual, norm, EPS, scales=one[1])),
        "lm_head": ("project", lambda x, one: project(x, one[0], scales=one[1])),
    }
    matrices = sizes.matrices()
    for name, (function, call) in calls.items():
        out, width = matrices[name]
        itemsize = weight(1, 16)[0].element_size()
        nbytes = out * width * itemsize
        many = [weight(out, width) for _ in range(copies_for(nbytes, small))]
        x = sizes.random(rows, width)
        moved = nbytes + rows * (out + width) * sizes.dtype.itemsize
        yield KernelCase(
            f"{function} {name}{label} {out}×{width}, {rows} rows",
            over(many, partial(call, x)),
            Work(moved, 2.0 * rows * out * width),
            len(many),
        )


def invariant_cases(sizes: KernelSizes, options: KernelOptions) -> Iterator[KernelCase]:
    """Yield the batch-invariant kernels of `--deterministic`."""
    out, width = sizes.matrices()["gate_up"]
    nbytes = out * width * sizes.dtype.itemsize
    many = [sizes.random(out, width) * width**-0.5 for _ in range(copies_for(nbytes, options.small))]
    weight = sizes.random(sizes.hidden)
    for rows in (1, sizes.nodes):
        x = sizes.random(rows, width)
        moved = nbytes + rows * (out + width) * sizes.dtype.itemsize
        work = Work(moved, 2.0 * rows * out * width)
        yield KernelCase(
            f"invariant_gemm gate_up {out}×{width}, {rows} rows",
            over(many, partial(invariant_gemm, x)),
            work,
            len(many),
        )
        yield small_kernel(
            f"row_norm, {rows} rows", partial(row_norm, sizes.random(rows, sizes.hidden), weight, EPS)
        )
    del many
    token = 2 * sizes.kv_heads * sizes.head_dim * sizes.dtype.itemsize
    for batch, rows in ((1, 1), (1, sizes.nodes), (sizes.batches[-1], sizes.nodes)):
        inputs = attention_inputs(sizes, batch, rows, sizes.context, is_tree=rows > 1)
        table, prefixes, lengths, query_start, ancestors = inputs.rest
        paths = row_paths(prefixes, lengths, query_start, ancestors, batch * rows)
        planes = [
            paged(sizes, batch, sizes.context + rows)
            for _ in range(copies_for(batch * sizes.context * token, options.small))
        ]
        tokens = batch * (sizes.context + rows)
        work = Work(
            tokens * token,
            4.0 * sizes.heads * sizes.head_dim * batch * rows * (sizes.context + (rows + 1) / 2),
        )
        attend = partial(_attend_paths, inputs.q, table, paths, sizes)
        yield KernelCase(
            f"path_attention {rows} rows, batch {batch}, context {sizes.context}",
            over(planes, attend),
            work,
            len(planes),
        )


def _attend_paths(
    q: torch.Tensor,
    table: torch.Tensor,
    paths: RowPaths,
    sizes: KernelSizes,
    planes: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    return path_attention(
        q, *planes, table, paths, scale=sizes.head_dim**-0.5, max_kv_len=sizes.context + sizes.nodes
    )
