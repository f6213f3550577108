"""Ops of a fused decoder layer: interpreted Triton versions equal the references within their buffers."""

from dataclasses import replace

import pytest
import torch
from guards import Guards
from layer_cases import (
    check_add_sums,
    check_embed_rows,
    check_project,
    check_project_add,
    check_project_gated,
    check_project_normed,
    check_project_rotated,
    check_quantize_rows,
    check_rms_norm,
    check_rope_store,
    check_silu_mul,
)
from support.suite.cases import every_pair

from outrider.kernels._dispatch import Backend, force_backend
from outrider.kernels.add_norm import normalise
from outrider.kernels.skinny_gemm import Epilogue, Method, Overlap, Tile, choose_tile, project, project_add
from outrider.kernels.skinny_gemm.table import STORED, _stored, guess_tile

DOT = Tile(Method.DOT, 32, 32)
SPLIT = Tile(Method.DOT, 32, 16, splits=3)
SUM = Tile(Method.SUM, 4)
STAY = Tile(Method.STAY, 2, programs=3)
LIBRARY = Tile(Method.LIBRARY)
HALVES = Tile(Method.HALVES)
PROJECTIONS = [
    (1, 64, 64, DOT),
    (5, 70, 50, DOT),
    (33, 96, 100, SPLIT),
    (64, 40, 96, SPLIT),
    (1, 7, 40, SUM),
    (3, 8, 64, SUM),
    (1, 31, 40, STAY),
    (1, 5, 64, STAY),
    (2, 9, 30, LIBRARY),
    (4, 50, 70, None),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out", "columns", "tile"), PROJECTIONS)
def test_projections_of_any_size(
    dtype: torch.dtype, rows: int, out: int, columns: int, tile: Tile | None
) -> None:
    check_project("cpu", dtype, rows, out, columns, tile, Guards())


ADDED = [
    (1, 64, 96, DOT),
    (17, 50, 70, DOT),
    (6, 50, 70, SPLIT),
    (2, 30, 64, SUM),
    (1, 31, 70, STAY),
    (3, 20, 30, LIBRARY),
]


@pytest.mark.parametrize(
    ("rows", "width", "columns", "tile", "dtype", "bias"), every_pair(ADDED, DTYPES, [False, True])
)
def test_products_added_to_the_residual(
    rows: int, width: int, columns: int, tile: Tile, dtype: torch.dtype, bias: bool
) -> None:
    check_project_add("cpu", dtype, rows, width, columns, tile, Guards(), bias=bias)


def test_the_program_that_ends_last_adds_the_parts_and_leaves_its_counter_at_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from outrider.kernels.skinny_gemm import triton as compiled

    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(6, 96, generator=generator), torch.randn(50, 96, generator=generator)
    residual, norm = torch.randn(6, 50, generator=generator), torch.ones(50)
    with force_backend(Backend.TRITON):
        gathered = [project_add(x, weight, residual, norm, 1e-5, tile=SPLIT) for _ in range(2)]
        assert compiled.can_gather(weight, SPLIT)
        assert not bool(compiled._arrivals(weight).any())
        monkeypatch.setattr(compiled, "can_gather", lambda weight, tile: False)
        apart = project_add(x, weight, residual, norm, 1e-5, tile=SPLIT)
    assert torch.equal(gathered[0].residual, gathered[1].residual)
    torch.testing.assert_close(gathered[0].residual, apart.residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normalise(gathered[0]), normalise(apart), rtol=1e-5, atol=1e-5)
    assert gathered[0].sums is not None
    assert apart.sums is not None
    assert gathered[0].sums.shape != apart.sums.shape, "one of them was added by a launch of its own"


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("tile", [DOT, SUM, STAY])
def test_overlaps_change_no_number(tile: Tile, overlap: Overlap) -> None:
    check_project_add(
        "cpu", torch.float32, 6 if tile is DOT else 1, 64, 96, replace(tile, overlap=overlap), Guards()
    )


def test_programs_that_stay_compute_one_row() -> None:
    with force_backend(Backend.TRITON), pytest.raises(ValueError, match="2 rows"):
        project(torch.zeros(2, 16), torch.zeros(8, 16), tile=STAY)


GATED = [
    (1, 64, 96, DOT),
    (17, 50, 70, DOT),
    (2, 30, 64, SUM),
    (1, 31, 64, STAY),
    (3, 20, 30, LIBRARY),
    (3, 20, 30, HALVES),
]


@pytest.mark.parametrize(
    ("rows", "size", "width", "tile", "dtype", "bias", "gelu", "normed"),
    every_pair(GATED, DTYPES, [(False, False, True), (True, True, True), (False, False, False)]),
)
def test_gated_products(
    rows: int, size: int, width: int, tile: Tile, dtype: torch.dtype, bias: bool, gelu: bool, normed: bool
) -> None:
    check_project_gated("cpu", dtype, rows, size, width, tile, Guards(), bias=bias, gelu=gelu, normed=normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [DOT, SPLIT, Tile(Method.SUM, 2), LIBRARY, None])
def test_products_of_what_is_still_to_be_normed(dtype: torch.dtype, tile: Tile | None) -> None:
    check_project_normed("cpu", dtype, 3, 40, 70, tile, Guards())
    check_project_normed("cpu", dtype, 1, 40, 64, tile, Guards(), normed=tile is None)
    check_project_normed("cpu", dtype, 1, 40, 70, STAY, Guards())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "splits", "bias"),
    [(1, 64, 4, False), (7, 600, 1, True), (3, 1100, 2, True), (70, 40, 1, False)],
)
def test_partial_sums_are_added_and_normed(
    dtype: torch.dtype, rows: int, width: int, splits: int, bias: bool
) -> None:
    check_add_sums("cpu", dtype, rows, width, splits, Guards(), bias=bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (6, 700), (66, 20)])
def test_embeddings_and_norms(dtype: torch.dtype, rows: int, width: int) -> None:
    check_embed_rows("cpu", dtype, rows, width, Guards())
    check_rms_norm("cpu", dtype, rows, width, Guards())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "splits"), [(1, 64, 2), (5, 1100, 1), (2, 40, 3)])
@pytest.mark.parametrize(("bias", "normed"), [(False, False), (True, True)])
def test_gated_activations(
    dtype: torch.dtype, rows: int, size: int, splits: int, bias: bool, normed: bool
) -> None:
    check_silu_mul("cpu", dtype, rows, size, splits, Guards(), bias=bias, normed=normed)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "splits", "dtype", "bias", "head_norm", "normed"),
    every_pair(
        [(1, 4, 2, 16, 2), (7, 6, 1, 24, 1), (70, 2, 2, 8, 1), (70, 0, 2, 8, 1)],
        DTYPES,
        [(False, False, True), (True, True, True), (False, True, False)],
    ),
)
def test_rotation_and_store(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    splits: int,
    dtype: torch.dtype,
    bias: bool,
    head_norm: bool,
    normed: bool,
) -> None:
    check_rope_store(
        "cpu",
        dtype,
        rows,
        heads,
        kv_heads,
        dim,
        splits,
        Guards(),
        bias=bias,
        head_norm=head_norm,
        normed=normed,
    )


ROTATED = [
    (1, 4, 2, 16, 64, Tile(Method.SUM, 2)), (3, 2, 1, 24, 40, Tile(Method.SUM, 4)),
    (1, 3, 1, 24, 40, STAY),
    (7, 4, 2, 16, 64, DOT), (33, 3, 1, 24, 50, DOT),
    (4, 4, 2, 16, 64, SPLIT), (2, 4, 2, 16, 64, LIBRARY), (1, 2, 2, 32, 32, None),
    (5, 2, 2, 32, 32, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "width", "tile", "dtype", "bias", "normed"),
    every_pair(ROTATED, DTYPES, [(False, True), (True, False)]),
)
def test_rotated_products(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    width: int,
    tile: Tile | None,
    dtype: torch.dtype,
    bias: bool,
    normed: bool,
) -> None:
    check_project_rotated(
        "cpu", dtype, rows, heads, kv_heads, dim, width, tile, Guards(), bias=bias, normed=normed
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [DOT, SUM, STAY])
def test_weights_in_fp8(dtype: torch.dtype, tile: Tile) -> None:
    rows = 1 if tile is STAY else 3
    check_project("cpu", dtype, rows, 40, 70, tile, Guards(), fp8=True)
    check_project_add("cpu", dtype, rows, 40, 70, tile, Guards(), bias=True, fp8=True)
    check_project_gated("cpu", dtype, rows, 40, 70, tile, Guards(), bias=True, gelu=False, fp8=True)
    check_project_rotated("cpu", dtype, rows, 4, 1, 16, 70, tile, Guards(), bias=True, fp8=True)


def test_parts_of_products_with_fp8() -> None:
    check_project("cpu", torch.bfloat16, 5, 40, 70, SPLIT, Guards(), fp8=True)
    check_project_add("cpu", torch.bfloat16, 5, 40, 70, SPLIT, Guards(), fp8=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 4500)])
def test_rows_in_fp8(dtype: torch.dtype, rows: int, width: int) -> None:
    check_quantize_rows("cpu", dtype, rows, width, Guards())


def test_more_rows_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="513 rows"):
        project(torch.zeros(513, 16), torch.zeros(8, 16))
    with pytest.raises(ValueError, match="65 rows"):
        project(torch.zeros(65, 16), torch.zeros(8, 16).to(torch.float8_e4m3fn), scales=torch.ones(8))


@pytest.mark.parametrize("device", sorted(STORED))
def test_measured_tiles_fit_the_rows_they_were_measured_for(device: str) -> None:
    tiles = [(rows, tile) for counts in _stored(device).values() for rows, tile in counts.items()]
    assert {tile.method for _, tile in tiles} >= {Method.SUM, Method.STAY, Method.DOT}
    for rows, tile in tiles:
        assert (tile.programs > 0) == (tile.method is Method.STAY)
        assert tile.method is not Method.STAY or rows == 1
        assert tile.method is not Method.SUM or rows <= 4


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64])
def test_guessed_tiles_fit_their_epilogue(epilogue: Epilogue, rows: int) -> None:
    for out, columns in [(6144, 4096), (4096, 14336), (32000, 4096), (96, 64), (57344, 8192)]:
        tile = guess_tile(epilogue, out, columns, rows)
        assert tile.splits == 1 or epilogue is not Epilogue.GATED
        assert tile.method is Method.DOT or rows <= 4
        assert choose_tile(
            epilogue,
            torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"),
            torch.empty(out, columns, device="meta"),
        )
