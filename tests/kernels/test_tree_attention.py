"""tree_attention: the interpreted Triton version equals the reference and stays in its buffers."""

import pytest
import torch
from attention_cases import Sequence, check_tree_attention
from guards import Guards
from support.suite.cases import every_pair

from outrider.kernels.tree_attention import tree_attention
from outrider.kernels.tree_attention import triton as compiled
from outrider.kernels.tree_attention.plan import Blocks

MIXED = [Sequence(0, 5), Sequence(37, 1), Sequence(70, 9), Sequence(3, 2)]


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize(
    ("page_size", "dim", "heads", "kv_heads"), [(1, 16, 4, 4), (3, 24, 6, 2), (16, 64, 8, 1)]
)
def test_batches_of_unequal_sequences(
    tree: bool, page_size: int, dim: int, heads: int, kv_heads: int
) -> None:
    check_tree_attention(
        "cpu",
        torch.float32,
        MIXED,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        page_size=page_size,
        tree=tree,
        guards=Guards(),
        spare_rows=2,
    )


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions(dtype: torch.dtype, tree: bool) -> None:
    check_tree_attention(
        "cpu",
        dtype,
        [Sequence(40, 6), Sequence(100, 3)],
        heads=4,
        kv_heads=2,
        dim=32,
        page_size=16,
        tree=tree,
        guards=Guards(),
    )


@pytest.mark.parametrize("columns", [31, 32, 33, 64, 300])
def test_masks_of_any_width(columns: int) -> None:
    """Rows of one draft level: their own columns are last, after the scratch columns of earlier levels."""
    sequences = [Sequence(21, 4, columns), Sequence(0, 3, 5)]
    check_tree_attention(
        "cpu", torch.float32, sequences, heads=2, kv_heads=1, dim=16, page_size=3, tree=True, guards=Guards()
    )


@pytest.mark.parametrize("mask_words", [1, 4])
def test_columns_past_the_words_are_hidden_and_spare_words_do_no_harm(mask_words: int) -> None:
    shape = {"heads": 2, "kv_heads": 1, "dim": 16, "page_size": 3}
    check_tree_attention(
        "cpu",
        torch.float32,
        [Sequence(9, 20, 70)] * 2,
        tree=True,
        mask_words=mask_words,
        guards=Guards(),
        **shape,
    )


@pytest.mark.parametrize("tree", [True, False])
def test_window_hides_what_lies_too_far_back(tree: bool) -> None:
    sequences = [Sequence(50, 12), Sequence(90, 1), Sequence(2, 4)]
    check_tree_attention(
        "cpu",
        torch.float32,
        sequences,
        heads=2,
        kv_heads=2,
        dim=16,
        page_size=3,
        tree=tree,
        window=40,
        guards=Guards(),
    )


@pytest.mark.parametrize(("window", "give_positions"), [(1, True), (2, False), (4, True), (40, False)])
def test_windows_end_within_the_tree(window: int, give_positions: bool) -> None:
    """The positions are given for every second window."""
    sequences = [Sequence(50, 70), Sequence(0, 33), Sequence(300, 2, 70)]
    check_tree_attention(
        "cpu", torch.float32, sequences, heads=4, kv_heads=2, dim=16, page_size=3, tree=True, window=window,
        chain=True,
        give_positions=give_positions, guards=Guards(),
    )  # fmt: skip


def test_a_chain_with_a_window_equals_causal_rows_with_it() -> None:
    """Checks the reference itself, with a window shorter than the depth of the tree."""
    generator = torch.Generator().manual_seed(3)
    prefix, rows, window = 5, 40, 4
    kv = prefix + rows
    q, k, v = (torch.randn(count, 1, 16, generator=generator) for count in (rows, kv, kv))
    lens = torch.tensor([kv], dtype=torch.int32)
    masks = torch.tensor([[(1 << min(i + 1, 32)) - 1, (1 << max(i - 31, 0)) - 1] for i in range(rows)]).to(
        torch.int32
    )
    chain, causal = (
        tree_attention(
            q, k[None], v[None], torch.zeros(1, 1, dtype=torch.int32), lens - rows, lens,
            torch.tensor([0, rows], dtype=torch.int32), given,
            scale=0.25, max_query_len=rows, max_kv_len=kv, window=window,
        )
        for given in (masks, None)
    )  # fmt: skip
    torch.testing.assert_close(chain, causal)
    last = torch.softmax(q[-1] @ k[-window:, 0].T * 0.25, -1) @ v[-window:, 0]
    torch.testing.assert_close(causal[-1], last)


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("prefix", [50, 700])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_scores_are_capped_before_the_mask(tree: bool, prefix: int, softcap: float) -> None:
    sequences = [Sequence(prefix, 6), Sequence(0, 2)]
    check_tree_attention(
        "cpu",
        torch.float32,
        sequences,
        heads=4,
        kv_heads=2,
        dim=16,
        page_size=3,
        tree=tree,
        softcap=softcap,
        guards=Guards(),
    )


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("dim", [16, 40])
def test_one_long_sequence_is_split_over_programs(tree: bool, dim: int) -> None:
    """One block of rows and a thousand tokens of K/V.

    Splits contain only prefix, prefix and tree, or nothing (for the short neighbour).
    """
    sequences = [Sequence(700, 3), Sequence(1, 2)]
    check_tree_attention(
        "cpu",
        torch.float32,
        sequences,
        heads=2,
        kv_heads=1,
        dim=dim,
        page_size=3,
        tree=tree,
        guards=Guards(),
        spare_rows=1,
    )


@pytest.mark.parametrize(
    ("options", "transposed", "gathers"),
    every_pair(
        [
            {"tree": True},
            {"tree": False, "window": 40},
            {"tree": True, "window": 5, "chain": True, "sinks": True},
        ],
        [True, False],
        [True, False],
    ),
)
def test_every_form_merges_any_number_of_splits(
    transposed: bool, gathers: bool, options: dict[str, bool | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sequence fills its blocks, and some shares are empty."""
    blocks = Blocks(16, 32, 3, 4, 2, transposed=transposed, gathers=gathers)
    monkeypatch.setattr(compiled, "choose_blocks", lambda *_sizes: blocks)
    sequences = [Sequence(130, 5), Sequence(0, 3), Sequence(63, 20), Sequence(90, 2, 33)]
    check_tree_attention(
        "cpu",
        torch.bfloat16,
        sequences,
        heads=4,
        kv_heads=2,
        dim=32,
        page_size=3,
        guards=Guards(),
        spare_rows=1,
        **options,
    )
    assert not any(bool(counters.any()) for counters in compiled._COUNTERS.values()), (
        "counters must be zero for the next launch"
    )


def test_prefill_longer_than_a_block() -> None:
    check_tree_attention(
        "cpu",
        torch.float32,
        [Sequence(0, 150)],
        heads=2,
        kv_heads=1,
        dim=16,
        page_size=16,
        tree=False,
        guards=Guards(),
    )


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("prefix", [50, 700])
def test_sinks_take_part_in_every_softmax(tree: bool, prefix: int) -> None:
    """The sum of a long sequence is merged from splits; the sink must be added exactly once."""
    sequences = [Sequence(prefix, 6), Sequence(0, 2)]
    check_tree_attention(
        "cpu",
        torch.float32,
        sequences,
        heads=4,
        kv_heads=2,
        dim=16,
        page_size=3,
        tree=tree,
        sinks=True,
        guards=Guards(),
    )


def test_tree_rows_know_their_position_from_their_mask() -> None:
    sequences = [Sequence(50, 70), Sequence(90, 1), Sequence(2, 4)]
    check_tree_attention(
        "cpu", torch.float32, sequences, heads=4, kv_heads=2, dim=16, page_size=3, tree=True, window=60,
        give_positions=False, sinks=True,
        guards=Guards(),
    )  # fmt: skip


@pytest.mark.parametrize("tree", [True, False])
def test_heads_as_wide_as_a_latent(tree: bool) -> None:
    """DeepSeek caches rows of 512 latent and 64 rotated key dimensions, with one head for all queries."""
    sequences = [Sequence(37, 3), Sequence(0, 2)]
    check_tree_attention(
        "cpu",
        torch.float32,
        sequences,
        heads=8,
        kv_heads=1,
        dim=576,
        page_size=16,
        tree=tree,
        guards=Guards(),
    )


def test_a_capped_score_is_the_tanh_of_it() -> None:
    """Checks the reference itself."""
    q, k, v = (torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    got = tree_attention(
        q, k[None], v[None], table, torch.zeros_like(lens), lens, torch.tensor([0, 5], dtype=torch.int32),
        None,
        scale=0.25, max_query_len=5, max_kv_len=5, softcap=0.3,
    )  # fmt: skip
    scores = (0.3 * (q[:, 0] @ k[:, 0].T * 0.25 / 0.3).tanh()).masked_fill(
        ~torch.ones(5, 5).tril().bool(), -torch.inf
    )
    torch.testing.assert_close(got[:, 0], scores.softmax(-1) @ v[:, 0])


@pytest.mark.parametrize("sinks", [True, False])
def test_a_sink_is_a_logit_without_a_value(sinks: bool) -> None:
    """Checks the reference itself: a sink is equivalent to one more key whose value is zero."""
    q, k, v = (torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    logit = torch.tensor([0.7])
    got = tree_attention(
        q, k[None], v[None], table, torch.zeros_like(lens), lens, torch.tensor([0, 5], dtype=torch.int32),
        None,
        scale=0.25, max_query_len=5, max_kv_len=5, sinks=logit if sinks else None,
    )  # fmt: skip
    scores = (q[:, 0] @ k[:, 0].T * 0.25).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    weights = torch.cat([scores, logit.expand(5, 1)], 1).softmax(-1)[:, :-1] if sinks else scores.softmax(-1)
    torch.testing.assert_close(got[:, 0], weights @ v[:, 0])
