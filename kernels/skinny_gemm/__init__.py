"""skinny_gemm: few rows times a large weight matrix, fused with the next operation of a decoder layer.

Such a product takes as long as reading the matrix from memory. Products of up to `FEW_ROWS` rows use the
kernels in this package's module `triton`. Products of more rows use the kernels in the package `wide` or
torch's library, whichever measured faster for the shape.
"""

from __future__ import annotations

import torch

from outrider.kernels._dispatch import use_triton
from outrider.kernels._launch import expect, expect_contiguous
from outrider.kernels.add_norm import add_sums, normalise
from outrider.kernels.rope_store import Lookup, rope_store
from outrider.kernels.silu_mul import silu_mul
from outrider.kernels.skinny_gemm import library, reference
from outrider.kernels.skinny_gemm.table import choose_tile
from outrider.kernels.skinny_gemm.types import LIBRARY, Epilogue, Method, Overlap, Rotary, Tile
from outrider.kernels.stream import FEW_ROWS, MANY_ROWS, ResidualStream

__all__ = [
    "Epilogue", "Lookup", "Method", "Overlap", "Rotary", "Tile", "choose_tile", "project", "project_add",
    "project_gated", "project_normed",
    "project_rotated",
]  # fmt: skip


def project(
    x: torch.Tensor, weight: torch.Tensor, *, scales: torch.Tensor | None = None, tile: Tile | None = None
) -> torch.Tensor:
    """Return ``x @ weight.T``, or partial sums of this product, which the next kernel must add.

    Args:
        x: ``[rows, in]`` fp32/bf16/fp16, at most `MANY_ROWS` rows (`FEW_ROWS` with `scales`); rows may be
            strided.
        weight: ``[out, in]``, contiguous, in x's dtype, or in e4m3 with `scales`. Before tensor cores
            multiply x by an FP8 weight, `quantize_rows` converts x to FP8.
        scales: ``[out] fp32``, contiguous, factor of each row of an FP8 weight, or None.
        tile: How to compute the product. With None, `choose_tile` chooses the tile for this shape.

    Returns:
        ``[rows, out]`` in x's dtype, or partial sums ``[splits, rows, out] fp32`` of the product. `add_sums`,
        `rope_store` and `silu_mul` accept both forms.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.skinny_gemm import project
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> project(torch.tensor([[1.0, 2.0]]), weight)
        tensor([[1., 2., 3.]])
    """
    _check(x, weight, scales)
    if not use_triton(x):
        return reference.project(x, weight, scales)
    from outrider.kernels.skinny_gemm import triton as compiled
    from outrider.kernels.skinny_gemm.wide import triton as wide

    # A given or measured tile may not fit these tensors' addresses and strides.
    tile = _usable(tile or choose_tile(Epilogue.PLAIN, x, weight), x, weight)
    if tile.method is Method.LIBRARY:
        return library.project(x, weight, scales, tile.splits)
    if tile.method is Method.WIDE:
        return wide.project(x, weight, tile)
    return compiled.project(x, weight, scales, tile)


def project_normed(stream: ResidualStream, weight: torch.Tensor, *, tile: Tile | None = None) -> torch.Tensor:
    """Return ``norm(stream) @ weight.T``, or partial sums of this product, which the next kernel must add.

    This is `project` plus the RMS norm's last step, a division by the root mean square.

    Args:
        stream: The residual stream; the row limit of `project` applies.
        weight: ``[out, width]``, contiguous, in the dtype of the stream's rows.
        tile: How to compute the product, as in `project`.

    Returns:
        The product or partial sums of it, in the forms that `project` returns.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.add_norm import embed_rows
        >>> from outrider.kernels.skinny_gemm import project_normed
        >>> stream = embed_rows(torch.tensor([0]), torch.tensor([[4.0, -4.0]]), torch.tensor([1.0, 3.0]), 0.0)
        >>> project_normed(stream, torch.tensor([[1.0, 0.0], [1.0, 1.0]]))  # the normed row is (1, -3)
        tensor([[ 1., -2.]])
    """
    x = stream.scaled
    _check(x, weight, None)
    if stream.sums is not None and use_triton(x):
        from outrider.kernels.skinny_gemm import triton as compiled

        chosen = tile or choose_tile(Epilogue.PLAIN, x, weight)
        # SUM runs many programs, and each of them would have to read all sums of squares.
        if chosen.method in (Method.DOT, Method.STAY):
            return compiled.project(x, weight, None, chosen, stream)
    return project(normalise(stream), weight, tile=tile)


def project_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> ResidualStream:
    """Return the residual stream after ``residual + x @ weight.T + bias``, prepared for the next RMS norm.

    In fp16, `add_sums` computes the sum and prepares the norm, in a separate launch.

    Args:
        x: Rows to multiply, as in `project`.
        weight: ``[width, in]``, as in `project`.
        residual: ``[rows, width]`` in x's dtype; rows may be strided.
        norm_weight: ``[width]``, weight of the next norm.
        eps: Epsilon of the next norm, added to the mean square.
        scales: Factors of an FP8 weight's rows, as in `project`.
        bias: ``[width]`` or None.
        out: ``[rows, width]`` that receives the sum; must not be `residual`. Rows may be strided, so `out`
            can be a slice of captured states. Allocated if None.
        tile: How to compute the product, as in `project`.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.add_norm import normalise
        >>> from outrider.kernels.skinny_gemm import project_add
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> stream = project_add(x, weight, torch.tensor([[3.0, 2.0]]), torch.tensor([1.0, 2.0]), 0.0)
        >>> stream.residual
        tensor([[4., 4.]])
        >>> normalise(stream)
        tensor([[1., 2.]])
    """
    _check(x, weight, scales)
    rows, width = residual.shape
    expect("weight", weight, (width, None))
    expect("residual", residual, (x.shape[0], width), x.dtype)
    expect("norm_weight", norm_weight, (width,))
    if out is not None:
        expect("out", out, (rows, width), x.dtype)
    # In fp16, whole rows must be divided (`normed_on_write`), but no program of a product sees a whole row.
    if use_triton(x) and x.dtype is not torch.float16:
        from outrider.kernels.skinny_gemm import triton as compiled
        from outrider.kernels.skinny_gemm.wide import triton as wide

        tile = _usable(tile or choose_tile(Epilogue.ADD, x, weight), x, weight)
        if tile.splits == 1 and tile.method is Method.WIDE:
            return wide.project_add(x, weight, bias, residual, norm_weight, eps, out, tile)
        if tile.method is not Method.LIBRARY and (tile.splits == 1 or compiled.can_gather(weight, tile)):
            return compiled.project_add(x, weight, scales, bias, residual, norm_weight, eps, out, tile)
    parts = project(x, weight, scales=scales, tile=tile)
    return add_sums(parts, residual, norm_weight, eps, bias=bias, out=out)


def project_gated(
    stream: ResidualStream,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gelu: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return ``act(gate) * up`` of a gated MLP.

    Gate and up are the two halves of ``norm(stream) @ weight.T + bias``.

    Args:
        stream: The residual stream; the row limit of `project` applies.
        weight: ``[2 * intermediate, width]``, gate first, as in `project`.
        scales: Factors of an FP8 weight's rows, as in `project`.
        bias: ``[2 * intermediate]`` or None.
        gelu: True selects gelu (tanh form) instead of silu.
        tile: How to compute the product, as in `project`.

    Returns:
        ``[rows, intermediate]`` in the dtype of the stream's rows.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        >>> import torch
        >>> from outrider.kernels.add_norm import embed_rows
        >>> from outrider.kernels.skinny_gemm import project_gated
        >>> stream = embed_rows(torch.tensor([0]), torch.tensor([[4.0, -4.0]]), torch.ones(2), 0.0)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, -1.0], [3.0, 0.0], [0.0, 5.0]])  # two gates, two values
        >>> project_gated(stream, weight)  # the normed row is (1, -1): silu(1) * 3, silu(1) * -5
        tensor([[ 2.1932, -3.6553]])
    """
    x = stream.scaled
    _check(x, weight, scales)
    if weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; gate and up need an even number of rows")
    if use_triton(x):
        from outrider.kernels.skinny_gemm import triton as compiled
        from outrider.kernels.skinny_gemm.wide.gated import triton as gated

        tile = _usable(tile or choose_tile(Epilogue.GATED, x, weight), x, weight)
        if tile.method is Method.WIDE:
            return gated.project_gated(stream, weight, bias, gelu, tile)
        if tile.method is Method.HALVES:
            return silu_mul(library.project_halves(x, weight), stream, bias=bias, gelu=gelu)
        if tile.method is not Method.LIBRARY:
            return compiled.project_gated(stream, weight, scales, bias, gelu, tile)
    return silu_mul(project(x, weight, scales=scales, tile=tile), stream, bias=bias, gelu=gelu)


def project_rotated(
    stream: ResidualStream,
    weight: torch.Tensor,
    rotary: Rotary,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    lookup: Lookup | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return the queries of ``norm(stream) @ weight.T + bias`` after the rotation (RoPE).

    The rotated keys and the values are stored in the planes of the KV cache. This is `project_normed` fused
    with `rope_store`.

    Args:
        stream: The residual stream; the row limit of `project` applies.
        weight: ``[(heads + 2 * kv_heads) * dim, width]``, rows ordered q, k, v, as in `project`.
        rotary: Angles of the rotation, planes of the KV cache, and KV slots.
        scales: Factors of an FP8 weight's rows, as in `project`.
        bias: ``[(heads + 2 * kv_heads) * dim]`` or None.
        lookup: Table entries to add to each row before the rotation, or None.
        tile: How to compute the product, as in `project`.

    Returns:
        ``[rows, heads, dim]`` in the dtype of `rotary.cos`; the planes may be FP8.

    Raises:
        ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.

    Example:
        One head is rotated by a quarter turn. The query (1, 0) becomes (0, 1), and the key (0, 1) becomes
        (-1, 0).

        >>> import torch
        >>> from outrider.kernels.add_norm import embed_rows
        >>> from outrider.kernels.skinny_gemm import Rotary, project_rotated
        >>> stream = embed_rows(torch.tensor([0]), torch.tensor([[4.0, 4.0]]), torch.ones(2), 0.0)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
        >>> cos, sin = torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]])
        >>> k_plane, v_plane = torch.zeros(1, 2, 1, 2), torch.zeros(1, 2, 1, 2)
        >>> project_rotated(stream, weight, Rotary(cos, sin, k_plane, v_plane, torch.tensor([1])))
        tensor([[[0., 1.]]])
        >>> k_plane[0, 1], v_plane[0, 1]
        (tensor([[-1.,  0.]]), tensor([[2., 3.]]))
    """
    x = stream.scaled
    _check(x, weight, scales)
    kv_heads, dim = rotary.k_plane.shape[2:]
    if weight.shape[0] % dim or weight.shape[0] // dim <= 2 * kv_heads:
        raise ValueError(
            f"weight has {weight.shape[0]} rows; "
            f"planes of {kv_heads} heads of {dim} need (heads + {2 * kv_heads}) * {dim}"
        )
    if use_triton(x):
        from outrider.kernels.skinny_gemm import triton as compiled
        from outrider.kernels.skinny_gemm.wide import triton as wide

        tile = _usable(tile or choose_tile(Epilogue.ROTATED, x, weight), x, weight, dim // 2)
        if lookup is not None:
            # The tensor-map kernels have no lookup. `rope_store` adds the lookup to the library's product.
            lookup.check(x.shape[0], weight.shape[0])
            tile = LIBRARY if tile.method is Method.WIDE else tile
        if tile.splits == 1 and tile.method is not Method.LIBRARY:
            expect("cos", rotary.cos, (x.shape[0], 1, dim))
            expect("sin", rotary.sin, (x.shape[0], 1, dim))
            expect("slots", rotary.slots, (x.shape[0],), torch.int64)
            for name in ("cos", "sin", "k_plane", "v_plane", "slots"):
                expect_contiguous(name, getattr(rotary, name))
            if tile.method is Method.WIDE:
                return wide.project_rotated(stream, weight, bias, rotary, tile)
            return compiled.project_rotated(stream, weight, scales, bias, rotary, lookup, tile)
    parts = project(x, weight, scales=scales, tile=tile)
    planes = rotary.k_plane, rotary.v_plane
    return rope_store(
        parts, rotary.cos, rotary.sin, *planes, rotary.slots, stream=stream, bias=bias, lookup=lookup
    )


def _usable(tile: Tile, x: torch.Tensor, weight: torch.Tensor, half: int = 1) -> Tile:
    """Return `tile`, or the library's tile if `tile` cannot multiply x and weight.

    `half` is half a head's size.
    """
    from outrider.kernels.skinny_gemm.wide import triton as wide

    return LIBRARY if tile.method is Method.WIDE and not wide.fits(x, weight, half) else tile


def _check(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None) -> None:
    expect("weight", weight, (None, x.shape[1]), x.dtype if scales is None else torch.float8_e4m3fn)
    expect_contiguous("weight", weight)
    if scales is not None:
        expect("scales", scales, (weight.shape[0],), torch.float32)
        expect_contiguous("scales", scales)
    most = MANY_ROWS if scales is None else FEW_ROWS
    if x.shape[0] > most:
        raise ValueError(f"x has {x.shape[0]} rows; at most {most} are supported")
