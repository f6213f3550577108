"""Tests of the division of chunks into tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shared.attn.tiles import LEAST_GAIN_US, SIZES, TileShape, gain_us, shapes_of, tiles_of

SMALL = (32, 16, 8, 4)
WIDTH = 32 * 128


@settings(deadline=None)
@given(st.integers(0, 150), st.integers(1, 90), st.sampled_from([4, 8, 16, 32, 100]))
def test_every_row_sees_every_token_up_to_itself_once(start: int, count: int, most_rows: int) -> None:
    stop = start + count
    tiles = tiles_of(start, stop, most_rows, SMALL)
    seen = torch.zeros(stop + 64, stop + 64, dtype=torch.int32)
    for tile in tiles:
        rows, keys, causal = tile.shape
        block = torch.ones(rows, keys, dtype=torch.int32)
        seen[tile.row : tile.row + rows, tile.key : tile.key + keys] += block.tril() if causal else block
    assert torch.equal(seen[start:stop, :stop], torch.ones(stop, stop, dtype=torch.int32).tril()[start:stop])
    assert {tile.shape for tile in tiles} <= set(shapes_of(most_rows, SMALL))
    assert max(tile.shape.rows for tile in tiles) <= max(most_rows, 4)
    assert min(tile.row for tile in tiles) > start - 4
    assert max(tile.row + tile.shape.rows for tile in tiles) < stop + 4


def test_a_whole_chunk_is_one_tile_and_a_prefix_adds_one_tile_per_8192_tokens() -> None:
    assert [tile.shape for tile in tiles_of(0, 8192, 8192)] == [TileShape(8192, 8192, True)]
    shapes = [tile.shape for tile in tiles_of(24576, 32768, 8192)]
    assert shapes == [TileShape(8192, 8192, False)] * 3 + [TileShape(8192, 8192, True)]


def test_few_shapes_are_needed() -> None:
    assert len(shapes_of(8192)) == 20
    assert shapes_of(8192)[0] == TileShape(8192, 8192, True)
    assert {shape.rows for shape in shapes_of(2048)} == {512, 1024, 2048}
    assert {shape.rows for shape in shapes_of(1)} == {SIZES[-1]}


@pytest.mark.parametrize(
    ("start", "stop", "pays"),
    [
        (0, 2048, True),
        (0, 8192, True),
        (0, 7000, True),
        (24576, 32768, True),
        (8192 - 512, 8192, False),  # four short tiles of the prefix: launches take as long as they save
        (8192, 8192 + 512, True),
        (0, 600, False),  # padding to 1024 rows, and few tokens
        (0, 512, False),
    ],
)
def test_tiles_are_used_where_they_are_estimated_to_gain(start: int, stop: int, pays: bool) -> None:
    gain = gain_us(tiles_of(start, stop, 8192), start, stop, WIDTH)
    assert (gain >= LEAST_GAIN_US) is pays


def test_the_estimate_is_near_the_measurements() -> None:
    """Measured on an H200: 268 - 125, 1586 - 943 and 22463 - 15151 us."""
    for stop, saved in ((2048, 143), (8192, 643)):
        assert gain_us(tiles_of(0, stop, stop), 0, stop, WIDTH) == pytest.approx(saved, rel=0.45)
