"""Tests of the pool's planes, and of the mapping from token indices to slots."""

from __future__ import annotations

import pytest
import torch

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.kv.pool import KVPool, token_bytes


def make_pool(page_size: int = 4, feature_size: int = 0) -> KVPool:
    return KVPool(12, page_size, 3, 2, 8, torch.float32, "cpu", feature_size)


def test_planes_have_the_contracts_shape_and_share_no_memory() -> None:
    pool = make_pool(feature_size=5)
    planes = pool.planes()
    assert [tuple(plane.shape) for plane in planes] == [(12, 4, 2, 8)] * 6 + [(12, 4, 5)]
    assert all(plane.is_contiguous() for plane in planes)
    for number, plane in enumerate(planes):
        plane.fill_(number + 1)
    assert [plane.unique().tolist() for plane in planes] == [[float(number + 1)] for number in range(7)]


def test_bytes_per_token_counts_every_plane() -> None:
    pool = make_pool(feature_size=5)
    assert pool.bytes_per_token == sum(plane.nbytes for plane in pool.planes()) // pool.capacity_tokens
    assert pool.bytes_per_token == token_bytes(3, 2, 8, torch.float32, 5)


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_slots_on_host_and_device_agree_for_scattered_pages(page_size: int) -> None:
    pool = make_pool(page_size)
    fillers = [pool.allocator.allocate(1) for _ in range(6)]
    for filler in fillers[::2]:
        assert filler is not None
        filler.release()
    lease = pool.lease(5 * page_size)
    assert lease is not None
    other = pool.lease(2 * page_size)
    assert other is not None
    table = pool.page_table([other, lease])
    assert table.shape == (2, 5)
    assert table.dtype == torch.int32
    start, n = page_size + 1, 3 * page_size
    slots = pool.slots(table, torch.tensor([0, start]), n)[1]
    assert slots.dtype == torch.int64
    assert slots.tolist() == pool.token_slots(lease, start, start + n)
    assert len(set(slots.tolist())) == n


def test_slot_views_are_the_planes() -> None:
    pool = make_pool()
    views = pool.slot_views(5, 6)
    assert len(views) == 6
    for number, (view, plane) in enumerate(zip(views, pool.planes(), strict=True)):
        view.fill_(number + 1)
        flat = plane.flatten(0, 1)
        assert view.shape == (1, 2, 6, 8)
        assert flat[5:11].eq(number + 1).all()
        assert not flat[:5].any()
        assert not flat[11:].any()


def test_reserve_grows_by_tokens_and_refuses_without_change() -> None:
    pool = make_pool()
    lease = pool.lease(5)
    assert lease is not None
    assert len(lease.pages) == 2
    assert pool.reserve(lease, 8)
    assert len(lease.pages) == 2
    assert pool.reserve(lease, 9)
    assert len(lease.pages) == 3
    assert not pool.reserve(lease, 12 * 4 + 1)
    assert len(lease.pages) == 3
    assert pool.lease(12 * 4) is None
    lease.release()
    pool.allocator.check()
    assert pool.allocator.free_pages == 12


@pytest.mark.parametrize("scattered", [False, True])
def test_features_are_read_back_from_where_they_were_stored(scattered: bool) -> None:
    pool = make_pool(feature_size=5)
    blockers = [pool.allocator.allocate(1) for _ in range(12)] if scattered else []
    for blocker in blockers:
        assert blocker is not None
        if blocker.pages[0] % 2:
            blocker.release()
    lease = pool.lease(10)
    assert lease is not None
    ascending = lease.pages == list(range(lease.pages[0], lease.pages[0] + len(lease.pages)))
    assert ascending is not scattered
    rows = torch.randn(7, 5)
    pool.store_features(rows, torch.tensor(pool.token_slots(lease, 2, 9)))
    read = pool.read_features(lease, 3, 9)
    assert torch.equal(read, rows[1:])
    read.zero_()
    assert torch.equal(pool.read_features(lease, 2, 9), rows), "read_features must return a copy"


def test_resizing_features_replaces_the_plane() -> None:
    pool = make_pool()
    assert pool.features is None
    pool.resize_features(6)
    assert pool.features is not None
    assert pool.features.shape == (12, 4, 6)
    pool.resize_features(0)
    assert pool.features is None
    assert pool.feature_size == 0
    assert len(pool.planes()) == 6


def test_a_pool_made_in_inference_mode_is_written_outside() -> None:
    with torch.inference_mode():
        pool = make_pool(feature_size=2)
    for plane in pool.planes():
        plane.fill_(1.0)


def test_a_pool_that_does_not_fit_says_what_it_needs() -> None:
    with pytest.raises(
        ConfigurationError, match=r"of 17592186044416 tokens needs 131072\.0 GiB, more than is free on cpu"
    ) as caught:
        KVPool(1 << 40, 16, 1, 1, 1, torch.float32, "cpu")
    assert caught.value.field == "kv_tokens"


def test_a_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size"):
        make_pool(page_size=0)


def test_scattered_features_are_stored_in_the_plane_and_in_the_slots_state() -> None:
    pool = KVPool(2, 4, 1, 1, 8, torch.float32, "cpu", feature_size=3)
    rows, out = torch.randn(3, 3), torch.zeros(2, 2, 3)
    pool.scatter_features(rows, torch.tensor([5, -1, 2]), torch.tensor([3, -1, 0]), out)
    assert pool.features is not None
    stored = pool.features.view(-1, 3)
    assert torch.equal(stored[[5, 2]], rows[[0, 2]])
    assert torch.equal(out.view(-1, 3)[[3, 0]], rows[[0, 2]])
    assert int(stored.any(1).sum()) == int(out.any(2).sum()) == 2
