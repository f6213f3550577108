"""How an attention launch is cut: every token has a program, few enough of them, and the next kernel starts when it was measured to."""

from __future__ import annotations

import pytest

from outrider.kernels.tree_attention.plan import Blocks, Release, choose_blocks

PROCESSORS = 132


def _plan(bs: int, rows: int, max_kv_len: int = 768) -> Blocks:
    """Return the blocks for `rows` rows of each sequence, 4 heads for each of 8 K/V heads of 128."""
    return choose_blocks(bs, bs * rows, rows * 4, 8, 128, 2, max_kv_len, PROCESSORS)


@pytest.mark.parametrize("bs", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("rows", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("max_kv_len", [1, 64, 768, 100_000])
def test_splits_fill_the_device_and_no_more(bs: int, rows: int, max_kv_len: int) -> None:
    blocks = _plan(bs, rows, max_kv_len)
    programs = -(-rows * 4 // blocks.pairs) * 8 * bs
    assert blocks.splits == 1 << (blocks.splits.bit_length() - 1)
    assert blocks.splits == 1 or programs * blocks.splits <= 2 * 4 * PROCESSORS
    assert blocks.splits < 2 * -(-max_kv_len // blocks.tokens) + 1


def test_steps_are_short_for_some_sequences_of_few_rows() -> None:
    assert [_plan(bs, 1).tokens for bs in (1, 2, 4, 8, 16)] == [64, 64, 32, 32, 64]
    assert [_plan(bs, 4).tokens for bs in (1, 4, 8, 16)] == [64, 32, 32, 64]
    assert _plan(4, 1).splits == choose_blocks(4, 4, 4, 8, 128, 2, 768, PROCESSORS).splits == 16, "as many as of longer steps"


@pytest.mark.parametrize(
    ("bs", "rows", "release"),
    [
        (1, 1, Release.AT_ONCE),
        (2, 1, Release.AT_ONCE),
        (1, 64, Release.AT_ONCE),
        (16, 4, Release.AT_ONCE),
        (1, 32, Release.WAITED),
        (8, 4, Release.LATE),
        (1, 6, Release.LATE),
        (16, 1, Release.LATE),
        (64, 1, Release.LATE),
        (1, 2048, Release.LATE),
    ],
)
def test_the_next_kernel_starts_when_it_was_measured_to(bs: int, rows: int, release: Release) -> None:
    assert _plan(bs, rows).release is release
