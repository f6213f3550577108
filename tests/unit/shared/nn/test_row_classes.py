"""The start compiles the products of a model for few numbers of rows, which stand for all others."""

from __future__ import annotations

import torch

from outrider.kernels.skinny_gemm import Epilogue, choose_tile
from outrider.kernels.stream import MANY_ROWS
from outrider.shared.nn.fused.products import ProductUse, RunTile, row_classes
from outrider.shared.nn.layers.linear import Linear

SHAPES = [(Epilogue.ROTATED, 6144, 4096), (Epilogue.GATED, 28672, 4096), (Epilogue.ADD, 4096, 14336)]


def test_every_number_of_rows_has_the_tiles_and_divisibility_of_a_class() -> None:
    uses = [
        ProductUse(epilogue, (Linear(torch.empty(out, columns, dtype=torch.bfloat16, device="meta")),), fail)
        for epilogue, out, columns in SHAPES
    ]

    def kernels(rows: int) -> tuple[object, ...]:
        x = torch.empty(rows, 0, device="meta")
        tiles = [choose_tile(use.epilogue, x, use.linears[0].weight) for use in uses]
        return *tiles, max(16, 1 << (rows - 1).bit_length()), rows % 16 == 0

    classes = row_classes(uses)
    assert {kernels(rows) for rows in range(1, MANY_ROWS + 1)} == {kernels(rows) for rows in classes}
    assert 1 in classes
    assert len(classes) < 50


def fail(_rows: int) -> RunTile:
    raise AssertionError("no product is computed")
