"""packed_round: the interpreted Triton version equals the reference and fulfils the contract.

The Triton version also stays in its buffers.
"""

from dataclasses import replace

import pytest
import torch
from guards import Guards
from packed_cases import RandomInputs, Sizes, check_gather_group, check_round

from outrider.kernels.packed_round import accept_entries, place_entries

SMALL = Sizes(slots=9, columns=4, results=7, entries=9, widest=6, padding=3, nodes=8, words=1, page_size=3)
ROUNDS = [
    Sizes(slots=1, columns=1, results=1, entries=1, widest=1, padding=0, nodes=1, words=1, page_size=16),
    SMALL,
    # As many entries as rows, and masks of several words.
    replace(SMALL, entries=60, padding=18, widest=40, nodes=40, words=4, page_size=1),
    # Trees wider than a program's block of rows, cut to their entry's rows; more words than the packed masks.
    Sizes(slots=6, columns=7, results=5, entries=5, widest=150, padding=0, nodes=180, words=5),
    # More columns than nodes.
    Sizes(slots=5, columns=19, results=4, entries=4, widest=3, padding=1, nodes=3, words=2),
]


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize("sizes", ROUNDS, ids=lambda sizes: f"{sizes.results}x{sizes.widest}")
def test_a_round(sizes: Sizes, with_logprobs: bool) -> None:
    accepted = [check_round("cpu", sizes, with_logprobs, seed, Guards()) for seed in range(4)]
    assert sizes.widest == 1 or any(accepted)


@pytest.mark.parametrize("width", [0, 1, 37, 1500])
@pytest.mark.parametrize("columns", [1, 3, 4])
def test_gather_group(columns: int, width: int) -> None:
    check_gather_group("cpu", SMALL, columns, width, Guards())


def test_a_deep_path_is_cut_to_the_columns_of_the_state() -> None:
    """A chain whose drafts are all right emits R tokens, and the slot continues after them."""
    sizes = Sizes(slots=1, columns=4, results=1, entries=1, widest=80, padding=0, nodes=80, words=3)
    case = RandomInputs(sizes, "cpu", seed=0)
    state = replace(
        case.state, committed_lens=case.ints([9]), limits=case.ints([99]), tokens=case.ints([[1, 0, 0, 0]]),
        counts=case.ints([1]),
    )  # fmt: skip
    entries = replace(
        case.entries, slots=case.ints([0]), starts=case.ints([0, 80]), drafted=case.ints([1]),
        captures=case.ints([1]),
    )  # fmt: skip
    trees = replace(
        case.trees, tokens=case.ints([1] * 80), parents=case.ints(range(-1, 79)), depths=case.ints(range(80)),
        ancestors=torch.zeros(80, 3, dtype=torch.int32), logprobs=torch.zeros(80), num_nodes=case.ints([80]),
    )  # fmt: skip
    table = case.ints([list(range(40))])
    placed = place_entries(state, entries, trees, table, 4, case.sampling)
    chosen = torch.ones(80, dtype=torch.int64)
    accepted = accept_entries(state, entries, trees, placed, chosen, table, 4, 1)
    assert accepted.packed.tolist() == [[3, 80, 0, 1, 2, 3, 1, 1, 1, 1]]
    assert (int(state.counts[0]), int(state.committed_lens[0])) == (4, 13)


def test_bad_arguments_are_named() -> None:
    case = RandomInputs(SMALL, "cpu", seed=0)
    placed = place_entries(case.state, case.entries, case.trees, case.page_table, 3, case.sampling)
    chosen = torch.zeros(case.rows, dtype=torch.int64)
    with pytest.raises(ValueError, match="results is 10, but there are 9 entries"):
        accept_entries(case.state, case.entries, case.trees, placed, chosen, case.page_table, 3, 10)
    trees = replace(case.trees, ancestors=torch.zeros(case.rows, 4, dtype=torch.int32)[:, ::2])
    with pytest.raises(ValueError, match=r"trees\.ancestors must be contiguous"):
        place_entries(case.state, case.entries, trees, case.page_table, 3, case.sampling)
    state = replace(case.state, limits=case.state.limits.long())
    with pytest.raises(ValueError, match=r"state\.limits has dtype"):
        place_entries(state, case.entries, case.trees, case.page_table, 3, case.sampling)
