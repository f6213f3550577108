"""Chooses a tile (a way to compute a matrix product): the measured tile if there is one, else one by a rule.

Measured tiles come from this package's files `STORED` or from trials on this machine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.kernels._launch import next_power_of_2
from outrider.kernels.skinny_gemm.types import LIBRARY, Epilogue, Method, Overlap, Tile
from outrider.kernels.stream import FEW_ROWS

STORED = {"NVIDIA H200": "tiles_h200.json", "NVIDIA H100 80GB HBM3": "tiles_h100.json"}
"""GPU model → file of this package with its measured tiles. On other GPUs, trials take precedence."""
_MODEL = "NVIDIA H200"  # other GPUs use the tiles of this one if they have no measured tiles

_SUM_ROWS = 2  # up to this many rows, the rule uses SUM
_SUM_BYTES = 65536  # bytes of the weight that a program of SUM keeps in registers
_SPLIT_FEATURES = 1024  # least number of columns of a split
_OVERLAP = 6  # index of the overlap among the fields of a tile

_Rows = dict[int, Tile]
_Shape = tuple[Epilogue, int, int]


@dataclass(frozen=True, slots=True)
class Product:
    """Matrix product that a tile is chosen for: ``[rows, in_features] @ [out_features, in_features].T``.

    Attributes:
        epilogue: Operation that follows the product.
        out_features: Rows of the weight.
        in_features: Columns of the weight.
        rows: Rows of the left operand x.
        dtype: Dtype of the weight.
    """

    epilogue: Epilogue
    out_features: int
    in_features: int
    rows: int
    dtype: torch.dtype

    @property
    def shape(self) -> _Shape:
        """Everything except rows and dtype."""
        return self.epilogue, self.out_features, self.in_features


_trials: dict[str, dict[tuple[_Shape, torch.dtype], _Rows]] = {}  # by device name


def choose_tile(epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor) -> Tile:
    """Return the measured tile of a matrix product, or the tile of `guess_tile` if none was measured.

    If no tile was measured for exactly this row count, a tile measured for more rows counts as measured.
    Products of more than `FEW_ROWS` rows without a measured tile are computed by torch's library.

    Args:
        epilogue: Operation that follows the product.
        x: ``[rows, in]``; only its number of rows is used.
        weight: ``[out, in]``.

    Returns:
        The tile.

    Example:
        >>> import torch
        >>> from outrider.kernels.skinny_gemm import Epilogue, choose_tile
        >>> weight = torch.empty(48, 32, dtype=torch.bfloat16)  # a shape without a measured tile
        >>> rows = [torch.empty(count, 32, dtype=torch.bfloat16) for count in (1, 16, 65)]
        >>> [choose_tile(Epilogue.PLAIN, x, weight).method.value for x in rows]
        ['sum', 'dot', 'library']
    """
    return _choose(epilogue, weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, weight.device)


def measured_tile(product: Product, device: str) -> Tile | None:
    """Return the measured tile of a product on a kind of device, or None if there is none."""
    tables = (_stored_rows(product, device), _tried_rows(product, device), _stored_rows(product, _MODEL))
    found = (_least_above(measured, product.rows) for measured in tables)
    return next((tile for tile in found if tile is not None), None)


def stored_tile(product: Product, device: str = _MODEL) -> Tile | None:
    """Return the tile of a product from this package's file for a kind of device, or None if it has none.

    Example:
        >>> import torch
        >>> from outrider.kernels.skinny_gemm import Epilogue
        >>> from outrider.kernels.skinny_gemm.table import Product, stored_tile
        >>> product = Product(Epilogue.PLAIN, 6144, 4096, rows=1, dtype=torch.bfloat16)
        >>> stored_tile(product).method.value
        'sum'
    """
    return _least_above(_stored_rows(product, device), product.rows)


def needs_trial(product: Product, device: str) -> bool:
    """Return True if the tiles of a matrix product still have to be measured on a kind of device.

    On a device in `STORED`, a product in the device's file counts as measured. Any other product counts as
    measured only after a trial of exactly its row count. Other row counts do not suffice, because an
    interrupted run may have measured only some of them.

    Example:
        >>> import torch
        >>> from outrider.kernels.skinny_gemm import Epilogue
        >>> from outrider.kernels.skinny_gemm.table import Product, needs_trial
        >>> product = Product(Epilogue.PLAIN, out_features=48, in_features=32, rows=1, dtype=torch.bfloat16)
        >>> needs_trial(product, "a GPU")
        True
    """
    return stored_tile(product, device) is None and product.rows not in _tried_rows(product, device)


def _stored_rows(product: Product, device: str) -> _Rows:
    return _stored(device).get((product.shape, product.dtype.itemsize), {})


def _tried_rows(product: Product, device: str) -> _Rows:
    return _trials.get(device, {}).get((product.shape, product.dtype), {})


def _least_above(measured: _Rows, rows: int) -> Tile | None:
    """Return the tile of the least measured row count >= `rows`, or None.

    For at most `FEW_ROWS` rows, measurements of more than `FEW_ROWS` rows do not count.
    """
    fitting = (count for count in measured if count >= rows and (count > FEW_ROWS) == (rows > FEW_ROWS))
    nearest = min(fitting, default=None)
    return None if nearest is None else measured[nearest]


def remember(device: str, tiles: Iterable[tuple[Product, Tile]]) -> None:
    """Make `choose_tile` return these tiles from now on for this kind of device.

    CUDA graphs captured earlier keep their tiles.

    Example:
        >>> import torch
        >>> from outrider.kernels.skinny_gemm import Epilogue, Method, Tile
        >>> from outrider.kernels.skinny_gemm.table import Product, forget_trials, needs_trial, remember
        >>> product = Product(Epilogue.PLAIN, out_features=48, in_features=32, rows=1, dtype=torch.bfloat16)
        >>> remember("a GPU", [(product, Tile(Method.SUM, 4))])
        >>> needs_trial(product, "a GPU")
        False
        >>> forget_trials()
    """
    table = _trials.setdefault(device, {})
    for product, tile in tiles:
        table.setdefault((product.shape, product.dtype), {})[product.rows] = tile
    _choose.cache_clear()


def forget_trials() -> None:
    """Forget all trials of this process, so that tiles are chosen as if no trial had run."""
    _trials.clear()
    _choose.cache_clear()


@functools.cache
def device_name(device: torch.device) -> str:
    """Return the name of the GPU model, under which tiles are stored; an empty string for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@functools.cache
def _choose(
    epilogue: Epilogue,
    out_features: int,
    in_features: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tile:
    product = Product(epilogue, out_features, in_features, rows, dtype)
    measured = measured_tile(product, device_name(device))
    if measured is not None:
        return measured
    if product.rows > FEW_ROWS:
        return LIBRARY
    return guess_tile(*product.shape, product.rows, product.dtype.itemsize)


@functools.cache
def _stored(device: str) -> dict[tuple[_Shape, int], _Rows]:
    """Read the file of a kind of device. The result is empty if there is no such file.

    Each entry is a list: epilogue, out, in, rows, itemsize, fields of a tile.
    """
    table: dict[tuple[_Shape, int], _Rows] = {}
    if device not in STORED:
        return table
    path = Path(__file__).with_name(STORED[device])
    for epilogue, out_features, in_features, rows, itemsize, *tile in json.loads(path.read_text()):
        table.setdefault(((Epilogue[epilogue], out_features, in_features), itemsize), {})[rows] = tile_of(
            tile
        )
    return table


def tile_of(fields: list[Any]) -> Tile:
    """Read a tile written as a list of its fields; trailing fields with default values may be omitted.

    Raises:
        TypeError, ValueError: The list does not describe a tile.
    """
    method, *numbers = fields
    numbers[_OVERLAP:] = [*map(Overlap, numbers[_OVERLAP : _OVERLAP + 1]), *numbers[_OVERLAP + 1 :]]
    return Tile(Method(method), *numbers)


def guess_tile(epilogue: Epilogue, out_features: int, in_features: int, rows: int, itemsize: int = 2) -> Tile:
    """Return a tile for a shape without measurements.

    The rule aims for enough programs to fill about 132 multiprocessors, without adding up many partial sums.

    Example:
        >>> from outrider.kernels.skinny_gemm import Epilogue
        >>> from outrider.kernels.skinny_gemm.table import guess_tile
        >>> [guess_tile(Epilogue.PLAIN, 4096, 4096, rows).method.value for rows in (1, 16)]
        ['sum', 'dot']
    """
    paired = epilogue in (Epilogue.GATED, Epilogue.ROTATED)
    if rows <= _SUM_ROWS:
        elements = _SUM_BYTES // max(2, itemsize) // next_power_of_2(in_features) // (2 if paired else 1)
        most = 4 if paired or itemsize == 1 else 8
        return Tile(Method.SUM, max(1, min(most, elements)), splits=1, warps=4 if itemsize == 1 else 8)
    if itemsize > 2:
        return Tile(Method.DOT, 32, 32, 1, 4, 2)
    if itemsize == 1:
        return _guess_narrow(epilogue, -(-out_features // 64), rows)
    if epilogue is Epilogue.GATED:
        return Tile(Method.DOT, 64, 128 if rows <= 16 else 64, 1, 4, 3 if rows <= 16 else 4)
    if epilogue is Epilogue.ROTATED:
        return Tile(Method.DOT, 32, 128, 1, 4, 5)
    blocks = -(-out_features // 64)
    if blocks >= 256:
        return Tile(Method.DOT, 128 if blocks >= 512 else 64, 128, 1, 4, 3)
    if rows <= 16 and epilogue is Epilogue.ADD:
        return Tile(Method.DOT, 64, 128, 1, 4, 5)
    # Splits need a launch that adds them up. For short rows, that launch takes longer than reading a row in
    # one go.
    splits = 1 << max(0, (200 // blocks).bit_length() - 1)
    return Tile(Method.DOT, 64, 128, min(splits, 4, max(1, in_features // _SPLIT_FEATURES)), 4, 4)


def _guess_narrow(epilogue: Epilogue, blocks: int, rows: int) -> Tile:
    """Return a tile for an FP8 product with 64 times `blocks` outputs.

    The tile has at least 64 rows of the weight, because FP8 instructions need that number.
    """
    if epilogue is Epilogue.ROTATED:
        return Tile(Method.DOT, 32, 256, 1, 4, 4)
    few = rows <= 16
    if epilogue is Epilogue.GATED:
        return Tile(Method.DOT, 64, 256 if few else 128, 1, 4, 3 if few else 4)
    if blocks >= 256:
        return Tile(Method.DOT, 128, 256 if few else 128, 1, 4, 3 if few else 4)
    return Tile(Method.DOT, 64, 256, min(1 << max(0, (200 // blocks).bit_length() - 1), 4), 4, 4)
