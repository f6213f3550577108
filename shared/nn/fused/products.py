"""Lists the matrix products of a model with fused kernels, so that a trial can time GEMM tiles for them.

Products are grouped by shape and by the operation that follows the product. The timed work includes the
kernel that reads the result of the product, because this kernel may have to add partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from outrider.kernels._launch import ceil_div, next_power_of_2
from outrider.kernels.add_norm import add_sums
from outrider.kernels.rope_store import rope_store
from outrider.kernels.skinny_gemm import (
    Epilogue,
    Rotary,
    Tile,
    choose_tile,
    project,
    project_add,
    project_gated,
    project_rotated,
)
from outrider.kernels.skinny_gemm.table import Product
from outrider.kernels.stream import MANY_ROWS, ResidualStream, normed_on_write
from outrider.shared.nn.config.model_config import Activation
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.modules import Attention, GatedMLP

_PAGE = 16
_EPS = 1e-5
_FEW_SUMS, _MANY_SUMS = 64, 4
"""Columns per partial sum of squares in a `ResidualStream`.

`_MANY_SUMS` is used with one or two rows, and `_FEW_SUMS` with more rows.
"""

_DIVISOR = 16
"""Triton compiles separate kernels for numbers that are divisible by this number."""

RunTile = Callable[[torch.Tensor, torch.Tensor | None, Tile], object]
"""A function that computes a product. It takes a weight ``[out, in]``, its scales, and the tile to use."""
Prepare = Callable[[int], RunTile]
"""A function that creates the inputs for a number of rows, and returns a `RunTile` function to time."""


@runtime_checkable
class HasProducts(Protocol):
    """A model that may run with fused kernels."""

    def uses(self) -> list[ProductUse]:
        """Return the uses of the model's products. The list is empty if the model has no fused kernels."""
        ...


@dataclass(frozen=True, slots=True)
class ProductUse:
    """Matrix products of one shape that are used in the same way.

    Attributes:
        epilogue: Operation that follows the product.
        linears: All linear layers whose matrices have this shape and use.
        prepare: Function that creates inputs for a number of rows; see `Prepare`.
    """

    epilogue: Epilogue
    linears: tuple[Linear, ...]
    prepare: Prepare

    def of(self, rows: int) -> Product:
        """Return the description of this matrix product for `rows` rows. Tile choices are stored under it."""
        weight = self.linears[0].weight
        return Product(self.epilogue, weight.shape[0], weight.shape[1], rows, weight.dtype)


def uses_of(
    layers: Sequence[tuple[Attention, GatedMLP]], head: Linear, dtype: torch.dtype, *, reduced: bool
) -> list[ProductUse]:
    """Group the matrix products of a model by their shape and use.

    Args:
        layers: Attention and MLP of each layer.
        head: The output head.
        dtype: Type of the rows.
        reduced: True if the o and down products are summed over ranks before they are added to the residual
            stream.
    """
    # This matches `blocks`: in fp16, `project_add` is a plain product followed by `add_sums`.
    adds = Epilogue.PLAIN if reduced or normed_on_write(1, dtype) else Epilogue.ADD
    found: dict[Product, tuple[Epilogue, list[Linear], Prepare]] = {}

    def note(epilogue: Epilogue, linear: Linear, prepare: Prepare) -> None:
        product = Product(epilogue, linear.out_features, linear.in_features, 1, linear.weight.dtype)
        found.setdefault(product, (epilogue, [], prepare))[1].append(linear)

    for attention, mlp in layers:
        rotated = Epilogue.ROTATED if attention.head_norm is None else Epilogue.PLAIN
        note(rotated, attention.qkv, partial(_prepare_qkv, attention, dtype))
        note(adds, attention.o, partial(_prepare_added, attention.o, dtype, adds))
        note(Epilogue.GATED, mlp.gate_up, partial(_prepare_gated, mlp, dtype))
        note(adds, mlp.down, partial(_prepare_added, mlp.down, dtype, adds))
    note(Epilogue.PLAIN, head, partial(_prepare_head, head, dtype))
    return [ProductUse(epilogue, tuple(linears), prepare) for epilogue, linears, prepare in found.values()]


def merged(uses: Iterable[ProductUse]) -> list[ProductUse]:
    """Merge uses that have the same shape and epilogue."""
    found: dict[Product, ProductUse] = {}
    for use in uses:
        known = found.get(use.of(1))
        found[use.of(1)] = (
            use if known is None else ProductUse(use.epilogue, known.linears + use.linears, known.prepare)
        )
    return list(found.values())


def row_classes(uses: Sequence[ProductUse]) -> list[int]:
    """Return numbers of rows, one for each set of compiled kernels with which these products are computed.

    Any other number of rows up to `MANY_ROWS` needs the same kernels as one of these.

    Args:
        uses: The products of a model.
    """
    found: dict[object, int] = {}
    for rows in range(MANY_ROWS, 0, -1):
        x = torch.empty((rows, 0), device="meta")
        tiles = [choose_tile(use.epilogue, x, use.linears[0].weight) for use in uses]
        found.setdefault((*tiles, next_power_of_2(rows), rows % _DIVISOR == 0), rows)
    return sorted(found.values())


def _rows(rows: int, width: int, linear: Linear, dtype: torch.dtype) -> torch.Tensor:
    device = linear.weight.device
    return torch.randn(rows, width, device=device, generator=torch.Generator(device).manual_seed(rows)).to(
        dtype
    )


def _stream(rows: int, linear: Linear, dtype: torch.dtype) -> ResidualStream:
    width = linear.in_features
    x = _rows(rows, width, linear, dtype)
    if normed_on_write(rows, dtype):
        return ResidualStream(x, x, None, _EPS)
    parts = ceil_div(width, _MANY_SUMS if rows <= 2 else _FEW_SUMS)
    return ResidualStream(x, x, torch.full((parts, rows), width / parts, device=x.device), _EPS)


def _prepare_qkv(block: Attention, dtype: torch.dtype, rows: int) -> RunTile:
    stream, bias, norm = _stream(rows, block.qkv, dtype), block.qkv.bias, block.head_norm
    device, dim = stream.scaled.device, block.head_dim
    planes = torch.zeros(2, ceil_div(rows, _PAGE), _PAGE, block.num_kv_heads, dim, dtype=dtype, device=device)
    angles = torch.ones(rows, 1, dim, dtype=dtype, device=device)
    rotary = Rotary(angles, angles, planes[0], planes[1], torch.arange(rows, device=device))
    if norm is None:
        return lambda weight, scales, tile: project_rotated(
            stream, weight, rotary, scales=scales, bias=bias, tile=tile
        )
    weights, eps = norm.weight, norm.eps

    def run(weight: torch.Tensor, scales: torch.Tensor | None, tile: Tile) -> torch.Tensor:
        parts = project(stream.scaled, weight, scales=scales, tile=tile)
        where = rotary.cos, rotary.sin, rotary.k_plane, rotary.v_plane, rotary.slots
        return rope_store(parts, *where, stream=stream, bias=bias, head_norm=weights, head_eps=eps)

    return run


def _prepare_added(linear: Linear, dtype: torch.dtype, epilogue: Epilogue, rows: int) -> RunTile:
    x, residual = (
        _rows(rows, linear.in_features, linear, dtype),
        _rows(rows, linear.out_features, linear, dtype),
    )
    norm, bias = torch.ones_like(residual[0]), linear.bias

    def run(weight: torch.Tensor, scales: torch.Tensor | None, tile: Tile) -> ResidualStream:
        if epilogue is Epilogue.ADD:
            return project_add(x, weight, residual, norm, _EPS, scales=scales, bias=bias, tile=tile)
        return add_sums(project(x, weight, scales=scales, tile=tile), residual, norm, _EPS, bias=bias)

    return run


def _prepare_gated(block: GatedMLP, dtype: torch.dtype, rows: int) -> RunTile:
    stream, bias, gelu = (
        _stream(rows, block.gate_up, dtype),
        block.gate_up.bias,
        block.activation is Activation.GELU_TANH,
    )
    return lambda weight, scales, tile: project_gated(
        stream, weight, scales=scales, bias=bias, gelu=gelu, tile=tile
    )


def _prepare_head(linear: Linear, dtype: torch.dtype, rows: int) -> RunTile:
    x = _rows(rows, linear.in_features, linear, dtype)

    def run(weight: torch.Tensor, scales: torch.Tensor | None, tile: Tile) -> torch.Tensor:
        parts = project(x, weight, scales=scales, tile=tile)
        return parts.sum(0) if parts.dim() == 3 else parts

    return run
