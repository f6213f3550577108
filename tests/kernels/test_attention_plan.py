"""Launch sizes of attention: every token has a program, the GPU is full, and releases are as measured."""

from __future__ import annotations

import pytest

from outrider.kernels.tree_attention.plan import Blocks, Release, choose_blocks

PROCESSORS = 132


def _plan(bs: int, rows: int, max_kv_len: int = 768) -> Blocks:
    """Return the blocks for `rows` rows of each sequence, 4 heads for each of 8 K/V heads of 128."""
    return choose_blocks(bs, bs * rows, rows * 4, 8, 128, 2, max_kv_len, PROCESSORS)


@pytest.mark.parametrize("bs", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("rows", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("max_kv_len", [1, 128, 129, 100_000])
def test_splits_fill_the_device_and_no_more(bs: int, rows: int, max_kv_len: int) -> None:
    blocks = _plan(bs, rows, max_kv_len)
    programs = -(-rows * 4 // blocks.pairs) * 8 * bs
    assert blocks.splits == 1 << (blocks.splits.bit_length() - 1)
    assert blocks.splits == 1 or programs * blocks.splits <= 4 * PROCESSORS
    assert blocks.splits == 1 or max_kv_len > 128, "a merge takes longer than a few steps"
    assert blocks == _plan(bs, rows, 100_000 if max_kv_len > 128 else 1), "contexts need no further variants"


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
@pytest.mark.parametrize("bs", [1, 2, 4, 8])
def test_long_contexts_fill_at_least_half_of_the_device(bs: int, rows: int) -> None:
    blocks = _plan(bs, rows, 100_000)
    assert 2 * -(-rows * 4 // blocks.pairs) * 8 * bs * blocks.splits >= PROCESSORS - 4


def test_few_pairs_of_some_sequences_are_the_narrow_side_and_merge_themselves() -> None:
    assert [_plan(bs, 4).transposed for bs in (1, 4, 8, 16, 64)] == [False, True, True, False, False]
    assert [_plan(bs, 4).splits for bs in (4, 8, 16, 64)] == [8, 4, 1, 1]
    assert all(_plan(bs, 4).gathers for bs in (4, 8))
    assert not any(_plan(bs, rows).transposed for bs in (1, 4, 64) for rows in (6, 8, 32))


def test_programs_with_a_multiprocessor_each_take_long_steps_where_there_is_room() -> None:
    sizes = [
        (blocks.pairs, blocks.tokens, blocks.splits, blocks.stages)
        for blocks in (_plan(16, rows) for rows in (1, 4, 6, 8))
    ]
    assert sizes == [(16, 64, 1, 4), (16, 128, 1, 3), (32, 128, 1, 3), (32, 128, 1, 3)]
    assert [_plan(16, rows).transposed for rows in (1, 4, 6, 8, 9, 32)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    for rows in (1, 4, 6):
        cramped = choose_blocks(16, 16 * rows, rows * 4, 8, 128, 2, 768, PROCESSORS, False)
        assert (cramped.tokens, cramped.stages, cramped.warps) == (64, 3, 4)


def test_steps_of_few_pairs_are_longer_beside_products_of_our_own() -> None:
    assert [(_plan(bs, rows).tokens, _plan(bs, rows).stages) for bs, rows in ((64, 1), (32, 4), (64, 4))] == [
        (64, 2),
        (32, 3),
        (32, 3),
    ]


def test_blocks_of_many_pairs_are_not_split_where_they_fill_the_device() -> None:
    assert [(_plan(16, rows).splits, _plan(16, rows).tokens) for rows in (6, 8, 32)] == [
        (1, 128),
        (1, 128),
        (1, 64),
    ]
    assert [_plan(bs, 32).splits for bs in (1, 4, 8, 16)] == [16, 4, 1, 1]
    assert [(_plan(bs, 6).splits, _plan(bs, 6).tokens) for bs in (1, 4)] == [(16, 32), (4, 32)]


@pytest.mark.parametrize(("dim", "itemsize"), [(1024, 2), (128, 4), (32, 2)])
def test_what_was_not_measured_needs_little(dim: int, itemsize: int) -> None:
    """Wide latents, fp32 and narrow heads get no deep pipelines, which would not fit into shared memory."""
    for rows in (1, 32, 2048):
        blocks = choose_blocks(4, 4 * rows, rows * 4, 8, dim, itemsize, 768, PROCESSORS)
        assert blocks.stages <= 2
        assert not blocks.transposed
        assert blocks.pairs * blocks.tokens * dim * itemsize <= 64 * 64 * 128 * 4


@pytest.mark.parametrize(
    ("bs", "rows", "release"),
    [
        (1, 1, Release.AT_ONCE),
        (2, 1, Release.AT_ONCE),
        (1, 64, Release.AT_ONCE),
        (16, 4, Release.LATE),
        (1, 32, Release.WAITED),
        (8, 4, Release.AT_ONCE),
        (16, 1, Release.LATE),
        (4, 32, Release.AT_ONCE),
        (16, 6, Release.LATE),
        (1, 6, Release.LATE),
        (64, 1, Release.LATE),
        (1, 2048, Release.LATE),
    ],
)
def test_the_next_kernel_starts_when_it_was_measured_to(bs: int, rows: int, release: Release) -> None:
    assert _plan(bs, rows).release is release
