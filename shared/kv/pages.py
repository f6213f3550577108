"""Allocator of a KV pool's pages: leases pages to sequences, in consecutive runs while there is room.

A lease (`PageLease`) is one sequence's right to its pages. Each page of a pool is in exactly one of three
states:

    page state   owner            becomes free by
    free         PageAllocator    -
    held         one PageLease    PageLease.release(), or leaving the lease's `with` block
    stored       a PageStore      eviction, or the end of the last lease that reads a removed page

The first `PageLease.shared` pages of a lease are stored pages, which other leases may read too. The later
pages belong to this lease only. ``free_pages + held_pages + stored pages == num_pages`` holds after every
call (`PageAllocator.check` asserts it).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import islice
from types import TracebackType
from typing import Protocol

COMPARED_RUNS = 64
"""Number of free runs that are compared to find the largest one. Comparing more runs would take too long."""


class PageStore(Protocol):
    """Keeps pages of ended leases for later sequences, and frees them when the allocator needs pages."""

    @property
    def evictable(self) -> int:
        """Number of pages that `evict` can free now."""
        ...

    def evict(self, n: int) -> list[int]:
        """Remove `n` ≤ `evictable` pages from the store and return their numbers."""
        ...

    def stored_pages(self) -> Collection[int]:
        """Return the numbers of all pages of the store."""
        ...


class PageAllocator:
    """Leases the pages ``0 … num_pages - 1`` of a KV pool. Not thread-safe: for the engine thread only.

    Free pages are kept as runs of consecutive pages. Attention on the CPU can read K/V in place if the pages
    of a lease are consecutive. The allocator therefore chooses consecutive pages, unless the pool is crowded:

    - A lease grows into the page after its last page if that page is free.
    - A new lease starts in the middle of the largest free run. The lease on the pages before this run can
      then still grow. If the run begins with page 0, or if its second half is too short, the new lease starts
      at the beginning of the run.

    Attributes:
        store: The `PageStore` that keeps pages of ended leases. With None, the pages of an ended lease become
            free.
        prefers_runs: True if consecutive pages are faster to read. The store then leaves half of the pages
            free.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_pages = num_pages
        self._run_starts = [0]  # ascending
        self._run_ends: dict[int, int] = {0: num_pages}  # start -> one past the run's last page
        self._free = num_pages
        self._leases: set[PageLease] = set()
        self.store: PageStore | None = None
        self.prefers_runs = False

    @property
    def free_pages(self) -> int:
        """Number of pages that are in no lease and in no store."""
        return self._free

    @property
    def available_pages(self) -> int:
        """Number of pages that can be leased: free pages, and stored pages that can be evicted."""
        return self._free if self.store is None else self._free + self.store.evictable

    @property
    def held_pages(self) -> int:
        """Number of pages in leases, without the pages that belong to the store."""
        return sum(len(lease.pages) - lease.shared for lease in self._leases)

    def allocate(self, n: int, shared: Sequence[int] = ()) -> PageLease | None:
        """Lease `n` ≥ 0 pages. Return None and change nothing if fewer pages are available.

        Args:
            n: Number of new pages, without the pages in `shared`.
            shared: Stored pages that become the first pages of the lease.
        """
        pages = self._take(n, after=shared[-1] if shared else None)
        if pages is None:
            return None
        lease = PageLease(self, [*shared, *pages], len(shared))
        self._leases.add(lease)
        return lease

    def check(self) -> None:
        """Assert that every page is free, in the page store, or owned by exactly one lease.

        Assert also that the runs of free pages are sorted, disjoint and not adjacent.
        """
        seen = bytearray(self.num_pages)
        previous_end = -1
        for start in self._run_starts:
            end = self._run_ends[start]
            assert previous_end < start < end, f"free runs touch or are empty at page {start}"
            previous_end = end
            for page in range(start, end):
                seen[page] += 1
        assert sum(seen) == self._free, f"{self._free} pages counted free, {sum(seen)} in runs"
        stored = [] if self.store is None else list(self.store.stored_pages())
        for page in [*stored, *(page for lease in self._leases for page in lease.own_pages)]:
            assert not seen[page], f"page {page} is owned twice"
            seen[page] += 1
        for lease in self._leases:
            assert set(lease.pages[: lease.shared]) <= set(stored), "a shared page is not in the store"
        assert all(seen), f"page {seen.find(0)} is neither free nor held nor stored"
        assert self.free_pages + self.held_pages + len(stored) == self.num_pages

    def _take(self, n: int, after: int | None) -> list[int] | None:
        """Remove `n` pages from the free runs, if possible those after `after`. Evict pages if needed."""
        if n < 0:
            raise ValueError(f"cannot take {n} pages")
        if n > self._free:
            if self.store is None or n - self._free > self.store.evictable:
                return None
            self.give_back(self.store.evict(n - self._free))
        pages: list[int] = []
        start = None if after is None else after + 1
        while len(pages) < n:
            if start is None or start not in self._run_ends:
                start = self._pick_start(n - len(pages))
            pages.extend(self._cut(start, n - len(pages)))
            start = None
        self._free -= n
        return pages

    def _pick_start(self, n: int) -> int:
        """Return the first page of a new lease of `n` pages. Split its run if the page is inside the run."""
        start = max(islice(self._run_starts, COMPARED_RUNS), key=lambda run: self._run_ends[run] - run)
        end = self._run_ends[start]
        middle = start + (end - start) // 2
        if start == 0 or middle == start or end - middle < n:
            return start
        # The lease before this run may still grow, so leave half of the run for that lease.
        self._run_ends[start] = middle
        self._insert_run(middle, end)
        return middle

    def _cut(self, start: int, n: int) -> range:
        """Remove up to `n` pages from the front of the run that starts at `start`, and return them."""
        end = self._run_ends.pop(start)
        taken = range(start, min(end, start + n))
        del self._run_starts[bisect_left(self._run_starts, start)]
        if taken.stop < end:
            self._insert_run(taken.stop, end)
        return taken

    def _insert_run(self, start: int, end: int) -> None:
        self._run_starts.insert(bisect_left(self._run_starts, start), start)
        self._run_ends[start] = end

    def give_back(self, pages: Sequence[int]) -> None:
        """Mark pages as free. Only leases and the store may call this, each for its own pages."""
        for page in sorted(pages):
            position = bisect_left(self._run_starts, page)
            start, end = page, page + 1
            if position < len(self._run_starts) and self._run_starts[position] == end:
                end = self._run_ends.pop(end)
                del self._run_starts[position]
            if position > 0 and self._run_ends[self._run_starts[position - 1]] == start:
                self._run_ends[self._run_starts[position - 1]] = end
            else:
                self._insert_run(start, end)
        self._free += len(pages)


class PageLease:
    """A lease: the pages of one sequence, in token order.

    Page i stores the tokens with indices ``[i · page_size, (i + 1) · page_size)``. Only
    `PageAllocator.allocate` creates leases. At the end of a ``with`` block, the lease is released.

    Attributes:
        pages: The page numbers. Empty after release. Only the lease itself may modify the list.
        shared: Number of leading pages that belong to the page store. Such a page must not be written once
            other sequences may read it.
        version: Changes whenever `pages` changes, so that callers can cache copies of the page table.
    """

    __slots__ = ("_allocator", "_first_new", "pages", "shared", "version")

    def __init__(self, allocator: PageAllocator, pages: list[int], shared: int = 0) -> None:
        self._allocator = allocator
        self.pages = pages
        self.shared = shared
        self.version = 0
        self._first_new = shared

    @property
    def first_new_page(self) -> int:
        """The first page that no other lease had when this lease began. Requires such a page.

        No two leases have the same such page at the same time. Other leases may read the page later, but only
        as a page that was stored before they began.
        """
        return self.pages[self._first_new]

    @property
    def own_pages(self) -> list[int]:
        """The pages that are in no other lease and not in the store."""
        return self.pages[self.shared :]

    @property
    def released(self) -> bool:
        """True if the lease has ended."""
        return self not in self._allocator._leases

    def extend(self, n: int) -> bool:
        """Append `n` ≥ 0 further pages. Return False and change nothing if fewer pages are available."""
        if self.released:
            raise ValueError("the lease was released; allocate a new one")
        pages = self._allocator._take(n, after=self.pages[-1] if self.pages else None)
        if pages is None:
            return False
        self.pages.extend(pages)
        self.version += 1
        return True

    def release(self) -> None:
        """Free the lease's own pages and end the lease. Further calls have no effect."""
        self.end(self.own_pages)

    def end(self, freed: Sequence[int]) -> None:
        """End the lease and free the pages `freed`. All other pages of the lease now belong to the store."""
        if not self.released:
            self._allocator._leases.discard(self)
            self._allocator.give_back(freed)
            self.pages, self.shared = [], 0
            self.version += 1

    def __enter__(self) -> PageLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
