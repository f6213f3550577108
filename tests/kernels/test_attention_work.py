"""Attention by a work list: every token once, the reference's results, and shares that fill the device."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from work_cases import ABSENT, IDLE, RaggedBatch, Shape, check_items, check_ragged

from outrider.kernels._dispatch import Backend, force_backend
from outrider.kernels.tree_attention import tree_attention
from outrider.kernels.tree_attention.work.types import choose_work

MIXED = [Sequence(0, 1), Sequence(499, 1), IDLE, Sequence(4999, 1), Sequence(0, 1), IDLE]
BESIDE_TREES = [
    Sequence(499, 1),
    Sequence(700, 24),
    IDLE,
    ABSENT,
    Sequence(30, 1),
    Sequence(3, 20, 40),
    ABSENT,
]
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("tree", [True, False])
def test_a_long_sequence_beside_short_and_idle_ones(tree: bool) -> None:
    check_ragged("cpu", torch.float32, MIXED, tree=tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 40}, {"softcap": 5.0}])
def test_single_rows_beside_trees(dtype: torch.dtype, options: dict[str, bool | int]) -> None:
    check_ragged("cpu", dtype, BESIDE_TREES, tree=True, max_query_len=32, spare_rows=2, **options)


@pytest.mark.parametrize("options", [{"sinks": True}, {"window": 40}, {"window": 40, "sinks": True}])
def test_causal_rows_with_windows_and_sinks(options: dict[str, bool | int]) -> None:
    sequences = [Sequence(300, 5), IDLE, Sequence(0, 7), Sequence(650, 1), ABSENT]
    check_ragged("cpu", torch.bfloat16, sequences, tree=False, **options)


@pytest.mark.parametrize("options", [{}, {"window": 20}])
def test_packed_prompts_and_one_block_of_padding(options: dict[str, int]) -> None:
    """A whole prompt, a chunk behind a prefix, and padding rows in a sequence of their own."""
    sequences = [Sequence(0, 40), Sequence(150, 13), Sequence(0, 11, 0), ABSENT]
    check_ragged("cpu", torch.float32, sequences, tree=False, max_query_len=64, **options)


@pytest.mark.parametrize("sequences", [MIXED, BESIDE_TREES])
def test_fp8_planes(sequences: list[Sequence]) -> None:
    check_ragged("cpu", torch.bfloat16, sequences, Shape(dim=64), tree=True, plane_dtype=FP8)


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_a_sequence_alone_is_split_over_the_device(rows: int) -> None:
    check_ragged("cpu", torch.bfloat16, [Sequence(900, rows)], Shape(dim=64), tree=True)


def test_heads_as_wide_as_a_latent() -> None:
    sequences = [Sequence(37, 3), IDLE, Sequence(200, 1)]
    check_ragged("cpu", torch.float32, sequences, Shape(8, 1, 576), tree=True)


@pytest.mark.parametrize("count", [2, 5, 16])
def test_plain_rows_of_measured_heads(count: int) -> None:
    """Few pairs per sequence: the programs that end last merge the splits."""
    sequences = [Sequence(700 if b == 1 else 20 * b, 1) for b in range(count)]
    check_ragged("cpu", torch.bfloat16, sequences, Shape(8, 2, 64), tree=False)


@given(
    counts=st.lists(
        st.tuples(st.integers(0, 2000), st.integers(0, 40), st.booleans()), min_size=1, max_size=40
    ),
    group=st.sampled_from([1, 3, 4, 8]),
    processors=st.sampled_from([8, 108, 132]),
    kv_heads=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=100, deadline=None)
def test_the_list_covers_every_token_and_stays_in_its_bounds(
    counts: list[tuple[int, int, bool]], group: int, processors: int, kv_heads: int
) -> None:
    """The reference makes the list; the interpreted kernel is compared with it elsewhere."""
    from outrider.kernels.tree_attention.work import reference

    spans = [(kv_len + rows if rows else 0, rows) for kv_len, rows, _ in counts]
    kv_lens = torch.tensor([kv_len for kv_len, _ in spans], dtype=torch.int32)
    starts = torch.tensor([0] + [rows for _, rows in spans]).cumsum(0).to(torch.int32)
    owners = torch.tensor([-1 if idle else b for b, (_, _, idle) in enumerate(counts)], dtype=torch.int32)
    rows = int(starts[-1])
    sizes = choose_work(
        len(counts), rows, max(1, *[rows for _, rows in spans], 0), group, kv_heads, 128, 2, processors, True
    )
    work = reference.plan_attention(kv_lens, starts, kv_lens, owners, sizes)
    assert work.items.shape[0] == sizes.items
    batch = RaggedBatch.__new__(RaggedBatch)
    batch.table, batch.query_start = torch.zeros(len(counts), 1), starts
    check_items(work, batch)


def uniform(bs: int, rows: int, kv_len: int) -> list[int]:
    """Return the number of splits of each of `bs` equal sequences, see `splits_of`."""
    return splits_of([kv_len] * bs, rows)


def splits_of(kv_lens: list[int], rows: int) -> list[int]:
    """Return the number of splits of each sequence on an H200, for 32 and 8 heads of 128."""
    from outrider.kernels.tree_attention.work import reference

    bs = len(kv_lens)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    starts = torch.arange(0, bs * rows + 1, rows, dtype=torch.int32)
    sizes = choose_work(bs, bs * rows, rows, 4, 8, 128, 2, 132, True)
    items = reference.plan_attention(lens, starts, lens, None, sizes).items
    return [int(items[items[:, 0] == b * rows][0, 9]) for b in range(bs)]


def test_uniform_batches_are_split_as_without_a_list() -> None:
    assert [uniform(1, 1, length)[0] for length in (500, 2000, 32_000)] == [8, 32, 32]
    assert [uniform(1, rows, 500)[0] for rows in (4, 6, 32)] == [8, 8, 8]
    assert [uniform(1, rows, 32_000)[0] for rows in (4, 6, 32)] == [32, 16, 16]
    assert [set(uniform(bs, 1, 8000)) for bs in (4, 16, 64, 256)] == [{8}, {1}, {1}, {1}]
    assert [set(uniform(bs, 32, 8000)) for bs in (4, 8, 16)] == [{4}, {1}, {1}]
    assert set(uniform(32, 4, 500)) == {1}


def test_one_long_sequence_is_cut_and_its_short_neighbours_are_not() -> None:
    splits = splits_of([32_000] + [500] * 31, 1)
    assert splits[1:] == [1] * 31
    assert 16 <= splits[0] <= 32
    nearly_equal = splits_of([500 + 7 * b for b in range(40)], 1)
    assert nearly_equal == [1] * 40


def test_the_grid_depends_on_no_length() -> None:
    grids = {
        tuple(
            RaggedBatch(
                "cpu", torch.bfloat16, [Sequence(kv_len, 1)] * 3, Shape(), tree=False, room=room
            ).plan().items.shape
        )
        for kv_len in (0, 1, 300)
        for room in (300, 2000)
    }  # fmt: skip
    assert len(grids) == 1


def test_a_list_of_another_step_is_refused() -> None:
    batch = RaggedBatch("cpu", torch.float32, [Sequence(3, 1)] * 2, Shape(), tree=False)
    other = RaggedBatch("cpu", torch.float32, [Sequence(3, 1)] * 3, Shape(), tree=False).plan()
    with pytest.raises(ValueError, match="work was planned for"):
        batch.attend(other)


@pytest.mark.parametrize("backend", Backend)
def test_table_rows_work_without_a_list(backend: Backend) -> None:
    planes = torch.tensor([0.0, 2.0, 4.0, 10.0]).view(2, 2, 1, 1)
    table = torch.tensor([[0], [1]], dtype=torch.int32)
    lens = torch.tensor([2, 2, 2], dtype=torch.int32)
    with force_backend(backend):
        out = tree_attention(
            torch.zeros(3, 1, 1), planes, planes, table, lens, lens, torch.arange(4, dtype=torch.int32), None,
            scale=1.0, max_query_len=1, max_kv_len=2, table_rows=torch.tensor([1, -1, 0], dtype=torch.int32),
        )  # fmt: skip
    assert out.flatten().tolist() == [7.0, 0.0, 1.0]
