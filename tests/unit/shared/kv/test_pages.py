"""Tests of the page ledger: no leaks, one owner per page, and contiguous leases while there is room."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from outrider.shared.kv.pages import PageAllocator, PageLease

NUM_PAGES = 9


class Ledger(RuleBasedStateMachine):
    """Random sequences of allocate, extend and release, checked against a plain count of pages."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.expected: dict[int, list[int]] = {}  # id(lease) -> pages as last seen

    def free(self) -> int:
        return NUM_PAGES - sum(len(pages) for pages in self.expected.values())

    @rule(target=leases, n=st.integers(0, NUM_PAGES + 1))
    def allocate(self, n: int):
        fits = n <= self.free()
        lease = self.allocator.allocate(n)
        assert (lease is not None) == fits
        if lease is None:
            return multiple()
        assert len(lease.pages) == n
        self.expected[id(lease)] = list(lease.pages)
        return lease

    @rule(lease=leases, n=st.integers(0, NUM_PAGES + 1))
    def extend(self, lease: PageLease, n: int) -> None:
        before = self.expected[id(lease)]
        fits = n <= self.free()
        assert lease.extend(n) == fits
        assert lease.pages[: len(before)] == before
        assert len(lease.pages) == len(before) + (n if fits else 0)
        self.expected[id(lease)] = list(lease.pages)

    @rule(lease=consumes(leases))
    def release(self, lease: PageLease) -> None:
        lease.release()
        lease.release()
        assert lease.pages == []
        del self.expected[id(lease)]

    @precondition(lambda self: not self.expected)
    @rule()
    def everything_comes_back(self) -> None:
        assert self.allocator.free_pages == NUM_PAGES
        lease = self.allocator.allocate(NUM_PAGES)
        assert lease is not None
        assert lease.pages == list(range(NUM_PAGES))
        lease.release()

    @invariant()
    def ledger_holds(self) -> None:
        self.allocator.check()
        assert self.allocator.free_pages == self.free()
        assert self.allocator.held_pages == NUM_PAGES - self.free()
        held = [page for pages in self.expected.values() for page in pages]
        assert len(held) == len(set(held))


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_lease_grows_contiguously_beside_others() -> None:
    allocator = PageAllocator(64)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert first is not None
    assert second is not None
    for _ in range(10):
        assert first.extend(1)
        assert second.extend(1)
    for lease in (first, second):
        assert lease.pages == list(range(lease.pages[0], lease.pages[0] + 12))


def test_the_last_free_page_is_leased_from_the_middle_of_the_pool() -> None:
    allocator = PageAllocator(5)
    leases = [allocator.allocate(pages) for pages in (2, 1, 2)]
    middle = leases[1]
    assert middle is not None
    freed = list(middle.pages)
    middle.release()
    allocator.check()
    last = allocator.allocate(1)
    assert last is not None
    assert last.pages == freed
    allocator.check()


def test_a_released_lease_cannot_grow_and_leaves_nothing_behind() -> None:
    allocator = PageAllocator(4)
    with allocator.allocate(3) or pytest.fail("three of the four pages must be free") as lease:
        assert (allocator.free_pages, allocator.held_pages) == (1, 3)
    assert lease.released
    assert (allocator.free_pages, allocator.held_pages) == (4, 0)
    with pytest.raises(ValueError, match="released"):
        lease.extend(1)
    allocator.check()


def test_an_exception_inside_the_block_frees_the_pages() -> None:
    allocator = PageAllocator(4)
    with (
        pytest.raises(RuntimeError, match="boom"),
        allocator.allocate(4) or pytest.fail("all pages must be free"),
    ):
        raise RuntimeError("boom")
    assert allocator.free_pages == 4


def test_the_check_notices_a_page_with_two_owners() -> None:
    allocator = PageAllocator(4)
    first, second = allocator.allocate(1), allocator.allocate(1)
    assert first is not None
    assert second is not None
    second.pages[0] = first.pages[0]
    with pytest.raises(AssertionError, match="owned twice"):
        allocator.check()


@pytest.mark.parametrize("n", [0, -1])
def test_an_empty_allocator_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(n)
