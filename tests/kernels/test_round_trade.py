"""round_trade: the interpreted Triton version equals the reference."""

import pytest
from guards import Guards
from trade_cases import check_admit_counts, check_blobs, check_pack_trees


@pytest.mark.parametrize("bs", [1, 3, 16, 33])
@pytest.mark.parametrize("number", [7, 6, -1, 0])
def test_a_state_counts_in_its_own_round_only(bs: int, number: int) -> None:
    check_admit_counts("cpu", bs, number, 7, Guards())


@pytest.mark.parametrize(("bs", "columns"), [(1, 1), (1, 32), (3, 33), (16, 6)])
def test_trees_are_packed_whole(bs: int, columns: int) -> None:
    check_pack_trees("cpu", bs, columns, Guards())


@pytest.mark.parametrize("num_bytes", [4, 256, 8192, 8196, 50_004])
def test_blobs_travel_through_a_slot(num_bytes: int) -> None:
    check_blobs("cpu", num_bytes, Guards(64))
