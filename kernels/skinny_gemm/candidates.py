"""Lists tiles to measure for a product of few rows: the default tile, similar ones, and the library's.

A tile that was measured on another GPU is listed, too.

A tile is one way to compute a matrix product. The default tile is the one that `guess_tile` returns for a
shape without measurements.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.kernels.skinny_gemm.table import Product, guess_tile, stored_tile
from outrider.kernels.skinny_gemm.types import LIBRARY, Epilogue, Method, Tile

_LEAST_SPLIT = 256
"""Least number of columns that a program sums up."""
_STAYING = 4
"""Programs per multiprocessor for tiles of `Method.STAY`."""


def candidates(product: Product, multiprocessors: int) -> list[Tile]:
    """Return distinct tiles, the default tile first.

    Args:
        product: Product of at most `FEW_ROWS` rows.
        multiprocessors: Number of multiprocessors of the device.

    Example:
        >>> import torch
        >>> from outrider.kernels.skinny_gemm import Epilogue
        >>> from outrider.kernels.skinny_gemm.candidates import candidates
        >>> from outrider.kernels.skinny_gemm.table import Product
        >>> product = Product(Epilogue.PLAIN, out_features=48, in_features=32, rows=1, dtype=torch.bfloat16)
        >>> [tile.method.value for tile in candidates(product, multiprocessors=132)]
        ['sum', 'sum', 'sum', 'stay', 'library']
    """
    rule = guess_tile(*product.shape, product.rows, product.dtype.itemsize)
    near = (
        _near_sum(product, rule, multiprocessors) if rule.method is Method.SUM else _near_dot(product, rule)
    )
    library = [] if product.dtype.itemsize == 1 else [LIBRARY]  # the library would first widen an FP8 weight
    stored = stored_tile(product)
    return list(dict.fromkeys((rule, *near, *([] if stored is None else [stored]), *library)))


def _near_sum(product: Product, rule: Tile, multiprocessors: int) -> list[Tile]:
    near = [replace(rule, block_n=rule.block_n // 2)] if rule.block_n > 1 else []
    near.append(replace(rule, warps=12 - rule.warps))
    if product.rows == 1:
        stay = replace(
            rule, method=Method.STAY, block_n=max(1, rule.block_n // 2), programs=_STAYING * multiprocessors
        )
        return [*near, stay]
    return [*near, guess_tile(*product.shape, product.rows + 1, product.dtype.itemsize)]


def _near_dot(product: Product, rule: Tile) -> list[Tile]:
    near = [replace(rule, block_k=rule.block_k // 2, stages=rule.stages + 1)]
    if rule.block_n <= 32:
        near.append(replace(rule, block_n=64, stages=min(rule.stages, 3)))
    elif product.dtype.itemsize > 1:  # FP8 instructions need 64 rows of the weight
        near.append(replace(rule, block_n=32))
    if rule.block_n >= 128:
        near.append(replace(rule, warps=12 - rule.warps))
    if product.epilogue in (Epilogue.PLAIN, Epilogue.ADD):
        if product.in_features >= 2 * rule.splits * _LEAST_SPLIT:
            near.append(replace(rule, splits=2 * rule.splits))
        if rule.splits > 1:
            near.append(replace(rule, splits=rule.splits // 2))
    elif product.epilogue is Epilogue.ROTATED:
        near.append(replace(rule, stages=rule.stages - 1))
    return near
