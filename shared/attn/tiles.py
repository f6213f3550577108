"""Divides the attention of a prompt chunk into tiles of a few fixed shapes, and estimates the tiles' time.

A library such as cuDNN compiles a plan for each shape of its inputs. Each plan takes tens to hundreds of
milliseconds. A chunk may have any length. The attention of a chunk is therefore divided into tiles of a few
shapes, for which plans exist already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SIZES = (8192, 4096, 2048, 1024, 512)
"""Possible numbers of rows or tokens of a tile, descending.

The largest size is the default size of a prompt chunk. A tile below the smallest size would take longer on
the host than on the GPU.
"""

# Constants for estimating the time of one layer, fitted to measurements on an H200 with 32 heads of 128
# elements. For 2048, 8192 and 32768 tokens, our kernel took 268, 1,586 and 22,463 us, respectively. cuDNN
# took 125, 943 and 15,151 us.
OWN_US, OWN_FLOPS_PER_US = 100.0, 395e6
TILE_US, TILE_FLOPS_PER_US = 40.0, 600e6
MERGE_BYTES_PER_US = 4e6
MERGE_BYTES = 10
"""Bytes that a merge reads and writes per output element: fp32 input and output, and one 16-bit input."""
LEAST_GAIN_US = 75.0
"""Smallest estimated gain for which tiles are used. Tiles need more launches, which take time on the host."""


class TileShape(NamedTuple):
    """The shape of one tile. A causal tile is square."""

    rows: int
    keys: int
    causal: bool


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """One tile: the attention of consecutive rows to consecutive tokens of the same sequence.

    Attributes:
        row: Token index of the first row.
        key: Token index of the first token that the rows attend to. In a causal tile, this is `row`. In other
            tiles, all rows see all tokens of the tile.
        shape: Number of rows, and number of tokens that they attend to.
    """

    row: int
    key: int
    shape: TileShape


def shapes_of(most_rows: int, sizes: Sequence[int] = SIZES) -> list[TileShape]:
    """Return the tile shapes that chunks of up to `most_rows` rows need, most useful shapes first."""
    row_sizes = _row_sizes(most_rows, sizes)
    squares = [TileShape(rows, rows, True) for rows in row_sizes]
    return squares + [TileShape(rows, keys, False) for keys in sizes for rows in row_sizes if rows <= keys]


def tiles_of(start: int, stop: int, most_rows: int, sizes: Sequence[int] = SIZES) -> list[AttentionTile]:
    """Divide the attention of rows ``[start, stop)`` of a sequence into tiles, in the order of the tokens.

    `start` is rounded down, and `stop` is rounded up, to a multiple of the smallest size. The rows are
    divided into blocks, and each block begins at a multiple of its size. The tokens before a block can
    therefore be divided into tiles that are at least as long as the block. This limits the number of shapes.
    The tiles of a row cover all tokens up to and including the row.

    Args:
        start, stop: Token indices, ``0 <= start < stop``.
        most_rows: Largest number of rows of a tile. A number below the smallest size counts as the smallest
            size.
        sizes: Possible sizes of tiles: powers of two, descending.
    """
    least = sizes[-1]
    first, last = start // least * least, -(-stop // least) * least
    tiles = []
    for row, rows in _cover(first, last, _row_sizes(most_rows, sizes)):
        tiles += [
            AttentionTile(row, key, TileShape(rows, keys, False)) for key, keys in _cover(0, row, sizes)
        ]
        tiles.append(AttentionTile(row, row, TileShape(rows, rows, True)))
    return sorted(tiles, key=lambda tile: (tile.key, tile.shape.keys, tile.row))


def gain_us(tiles: Sequence[AttentionTile], start: int, stop: int, width: int) -> float:
    """Return the estimated time that tiles save over this project's kernel, in microseconds per layer.

    Args:
        tiles: The result of `tiles_of`.
        start, stop: Token indices of the rows.
        width: Number of heads times elements per head.
    """
    count = stop - start
    own = OWN_US + 4 * width * count * (start + count / 2) / OWN_FLOPS_PER_US
    pairs = sum(tile.shape.rows * tile.shape.keys / (2 if tile.shape.causal else 1) for tile in tiles)
    merged = sum(tile.shape.rows for tile in tiles if not tile.shape.causal)  # one merge per such tile
    return own - (
        TILE_US * len(tiles)
        + 4 * width * pairs / TILE_FLOPS_PER_US
        + MERGE_BYTES * width * merged / MERGE_BYTES_PER_US
    )


def _row_sizes(most_rows: int, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size <= max(most_rows, sizes[-1])]


def _cover(first: int, last: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (position, size) of blocks that cover ``[first, last)``, each at a multiple of its size."""
    while first < last:
        size = next(size for size in sizes if first % size == 0 and first + size <= last)
        yield first, size
        first += size
