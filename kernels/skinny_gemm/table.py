"""Which tile computes a product: measured ones, and a rule for every other shape."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

from outrider.kernels._launch import next_power_of_2
from outrider.kernels.skinny_gemm.types import LIBRARY, Epilogue, Method, Overlap, Tile
from outrider.kernels.stream import FEW_ROWS

_SUM_ROWS = 2
_SUM_BYTES = 65536
_SPLIT_FEATURES = 1024
_OVERLAP = 6  # its place among the numbers of a tile


def choose_tile(epilogue: Epilogue, x: torch.Tensor, weight: torch.Tensor) -> Tile:
    """Return the measured tile of the nearest row count that was measured for this shape, else what `guess_tile` says.

    More than `FEW_ROWS` rows that nobody measured are the library's.
    """
    return _choose(epilogue, weight.shape[0], weight.shape[1], x.shape[0], weight.element_size())


@functools.cache
def _choose(epilogue: Epilogue, out_features: int, in_features: int, rows: int, itemsize: int) -> Tile:
    measured = _measured().get((epilogue, out_features, in_features, itemsize), {})
    many = rows > FEW_ROWS
    nearest = min((count for count in measured if count >= rows and (count > FEW_ROWS) == many), default=None)
    if nearest is not None:
        return measured[nearest]
    return LIBRARY if many else guess_tile(epilogue, out_features, in_features, rows, itemsize)


@functools.cache
def _measured() -> dict[tuple[Epilogue, int, int, int], dict[int, Tile]]:
    """Read ``tiles.json``, measured on an H200: epilogue, out, in, rows, itemsize, and the fields of a tile."""
    table: dict[tuple[Epilogue, int, int, int], dict[int, Tile]] = {}
    path = Path(__file__).with_name("tiles.json")
    for epilogue, out_features, in_features, rows, itemsize, method, *numbers in json.loads(path.read_text()):
        numbers[_OVERLAP:] = [*map(Overlap, numbers[_OVERLAP : _OVERLAP + 1]), *numbers[_OVERLAP + 1 :]]
        tile = Tile(Method(method), *numbers)
        table.setdefault((Epilogue[epilogue], out_features, in_features, itemsize), {})[rows] = tile
    return table


def guess_tile(epilogue: Epilogue, out_features: int, in_features: int, rows: int, itemsize: int = 2) -> Tile:
    """Return a tile for a shape that nobody measured: enough programs for about 132 multiprocessors, few enough to keep sums short."""
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
    # A part of the sum costs the launch that adds it up: more than reading a short row in one go.
    splits = 1 << max(0, (200 // blocks).bit_length() - 1)
    return Tile(Method.DOT, 64, 128, min(splits, 4, max(1, in_features // _SPLIT_FEATURES)), 4, 4)


def _guess_narrow(epilogue: Epilogue, blocks: int, rows: int) -> Tile:
    """Return a tile of an FP8 product of `blocks` times 64 outputs, of 64 rows of the weight at least: fewer use no FP8 instruction."""
    if epilogue is Epilogue.ROTATED:
        return Tile(Method.DOT, 32, 256, 1, 4, 4)
    few = rows <= 16
    if epilogue is Epilogue.GATED:
        return Tile(Method.DOT, 64, 256 if few else 128, 1, 4, 3 if few else 4)
    if blocks >= 256:
        return Tile(Method.DOT, 128, 256 if few else 128, 1, 4, 3 if few else 4)
    return Tile(Method.DOT, 64, 256, min(1 << max(0, (200 // blocks).bit_length() - 1), 4), 4, 4)
