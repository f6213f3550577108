"""Products of more than 64 rows: interpreted Triton tiles equal the references and stay in their buffers."""

import pytest
import torch
from guards import Guards
from layer_cases import check_project, check_project_add, check_project_gated, check_project_rotated

from outrider.kernels.skinny_gemm import Epilogue, Method, Tile, choose_tile
from outrider.kernels.skinny_gemm.wide.maps import readable_rows
from outrider.kernels.skinny_gemm.wide.triton import fits

TILE = Tile(Method.WIDE, 32, 32, block_m=64)
NARROW = Tile(Method.WIDE, 16, 16, block_m=32)
SPLIT = Tile(Method.WIDE, 32, 16, splits=3, block_m=64)
DTYPES = [torch.float32, torch.bfloat16]
ALIGNED = 64
"""Elements of a guard band, chosen so that addresses stay multiples of 16 bytes, as tensor maps need."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "out", "columns", "tile"), [(70, 96, 64, TILE), (130, 40, 104, NARROW), (66, 72, 88, SPLIT)]
)
def test_products_of_any_size(dtype: torch.dtype, rows: int, out: int, columns: int, tile: Tile) -> None:
    check_project("cpu", dtype, rows, out, columns, tile, Guards(ALIGNED))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "columns", "tile"), [(70, 96, 64, TILE), (130, 40, 72, NARROW), (66, 72, 88, SPLIT)]
)
def test_products_added_to_the_residual(
    dtype: torch.dtype, rows: int, width: int, columns: int, tile: Tile
) -> None:
    check_project_add("cpu", dtype, rows, width, columns, tile, Guards(ALIGNED), bias=rows == 70)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "size", "width", "tile"), [(70, 64, 96, TILE), (130, 56, 72, NARROW), (61, 32, 64, TILE)]
)
@pytest.mark.parametrize(("bias", "gelu", "normed"), [(False, False, False), (True, True, True)])
def test_gated_products(
    dtype: torch.dtype, rows: int, size: int, width: int, tile: Tile, bias: bool, gelu: bool, normed: bool
) -> None:
    check_project_gated(
        "cpu", dtype, rows, size, width, tile, Guards(ALIGNED), bias=bias, gelu=gelu, normed=normed
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bias", "normed"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "width", "tile"),
    [
        (70, 4, 2, 32, 64, TILE),
        (66, 3, 1, 16, 104, NARROW),
        (67, 2, 1, 128, 40, TILE),
        (66, 4, 2, 16, 64, SPLIT),
    ],
)
def test_rotated_products(
    dtype: torch.dtype,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    width: int,
    tile: Tile,
    bias: bool,
    normed: bool,
) -> None:
    check_project_rotated(
        "cpu", dtype, rows, heads, kv_heads, dim, width, tile, Guards(ALIGNED), bias=bias, normed=normed
    )


@pytest.mark.parametrize("epilogue", [Epilogue.PLAIN, Epilogue.ADD, Epilogue.ROTATED])
def test_parts_by_the_library(epilogue: Epilogue) -> None:
    tile = Tile(Method.LIBRARY, splits=2)
    if epilogue is Epilogue.PLAIN:
        check_project("cpu", torch.bfloat16, 70, 40, 96, tile, Guards(ALIGNED))
    elif epilogue is Epilogue.ADD:
        check_project_add("cpu", torch.bfloat16, 70, 40, 96, tile, Guards(ALIGNED), bias=True)
    else:
        check_project_rotated("cpu", torch.bfloat16, 70, 4, 1, 16, 96, tile, Guards(ALIGNED))


def test_tiles_reach_into_memory_of_their_own_but_not_outside() -> None:
    held = torch.zeros(128, 64)
    assert readable_rows(held[:70], 64) == 128
    assert readable_rows(held[:70], 32) == 96
    assert readable_rows(held[60:, :32], 64) == 68
    assert readable_rows(held[64:70], 64) == 64
    assert readable_rows(torch.zeros(70, 64), 64) == 70


def test_what_a_tensor_map_cannot_express_is_left_to_the_library() -> None:
    x, weight = torch.zeros(70, 96), torch.zeros(8, 96)
    assert fits(x, weight)
    assert not fits(x[:, 1:], weight[:, 1:].contiguous())
    assert not fits(x, weight, half=24)
    check_project("cpu", torch.float32, 70, 40, 50, TILE, Guards())
    check_project_rotated("cpu", torch.float32, 66, 4, 1, 24, 64, TILE, Guards(ALIGNED))


@pytest.mark.parametrize("rows", [65, 96, 128, 300, 512])
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_tiles_for_many_rows_hold_them(epilogue: Epilogue, rows: int) -> None:
    for out, columns in [(6144, 4096), (4096, 14336), (28672, 4096), (96, 64)]:
        tile = choose_tile(
            epilogue,
            torch.empty(rows, columns, dtype=torch.bfloat16),
            torch.empty(out, columns, device="meta"),
        )
        assert tile.method in (
            Method.WIDE,
            Method.LIBRARY,
            *((Method.HALVES,) if epilogue is Epilogue.GATED else ()),
        )
        assert tile.splits == 1 or epilogue is not Epilogue.GATED
