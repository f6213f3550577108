"""The sizes that rounds are padded to."""

from __future__ import annotations

import pytest

from outrider.shared.engine.buckets import padded_size, row_buckets


def test_row_buckets_start_fine_and_end_at_the_limit() -> None:
    buckets = row_buckets(2048)
    assert buckets[:5] == (1, 2, 4, 8, 16)
    assert buckets[-1] == 2048
    assert list(buckets) == sorted(set(buckets))
    assert [padded_size(buckets, rows) for rows in (1, 3, 5, 33, 129, 257, 600, 1025)] == [
        1, 4, 8, 40, 144, 320, 640, 1536,
    ]  # fmt: skip
    for rows in range(64, 2049):
        assert rows <= padded_size(buckets, rows) < 1.5 * rows, "padding must stay below a half"


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 100, 128, 2000, 5000])
def test_the_largest_row_bucket_is_the_limit_itself(limit: int) -> None:
    buckets = row_buckets(limit)
    assert padded_size(buckets, limit) == limit
    with pytest.raises(AssertionError):
        padded_size(buckets, limit + 1)
