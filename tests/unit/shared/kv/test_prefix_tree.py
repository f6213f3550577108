"""Tests the prefix cache as a state machine, against a plain model of which prefixes are stored where."""

from __future__ import annotations

from dataclasses import dataclass

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
from outrider.shared.kv.prefix_cache import PrefixCache

NUM_PAGES, SIZE = 14, 2
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=13)


@dataclass
class Reader:
    """A sequence with a lease.

    Attributes:
        lease: The lease.
        salt: The sequence's salt.
        tokens: The tokens; those below `prompt` are announced.
        cached, featured: Number of tokens whose K/V and feature rows are stored.
        trusted: False once the reader's pages may not be stored.
    """

    lease: PageLease
    salt: str
    tokens: list[int]
    cached: int
    featured: int
    trusted: bool = True


class PrefixMachine(RuleBasedStateMachine):
    """Leases, computes, ends, disowns, flushes and evicts in any order.

    `contents` is the model: what each page holds, as the salt and all tokens up to the end of the page. A
    page that a sequence finds must hold exactly its prefix.
    """

    readers = Bundle("readers")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.cache = PrefixCache(self.allocator, SIZE)
        self.live: list[Reader] = []
        self.contents: dict[int, tuple[str, list[int]]] = {}
        self.with_features: set[int] = set()
        self.bad: set[int] = set()

    @rule(target=readers, tokens=TEXTS, salt=st.sampled_from("ab"), features=st.booleans())
    def admit(self, tokens: list[int], salt: str, features: bool) -> object:
        match = self.cache.match(tokens, len(tokens) - 1, salt, with_features=features)
        pages = [node.page for node in match.nodes]
        assert len(pages) * SIZE < len(tokens), "the last token must be computed"
        for index, page in enumerate(pages):
            assert self.contents[page] == (salt, tokens[: (index + 1) * SIZE])
            assert page not in self.bad
            assert not features or page in self.with_features
        before, needed = self.allocator.available_pages, -(-len(tokens) // SIZE) + 1
        lease = self.cache.lease(match, needed)
        if lease is None:
            assert self.allocator.available_pages == before
            assert needed > before, "pages that nobody reads must be evicted"
            return multiple()
        assert lease.pages[: len(pages)] == pages
        assert not set(lease.own_pages) & {page for one in self.live for page in one.lease.pages}
        for page in lease.own_pages:
            self.contents.pop(page, None)
            self.with_features.discard(page)
            self.bad.discard(page)
        found = len(pages) * SIZE
        self.cache.promise(lease, tokens)
        reader = Reader(lease, salt, list(tokens), found, match.feature_pages * SIZE)
        self.live.append(reader)
        return reader

    @rule(reader=readers, count=st.integers(1, 6), features=st.booleans())
    def compute(self, reader: Reader, count: int, features: bool) -> None:
        start, stop = reader.cached, min(len(reader.tokens), reader.cached + count)
        for page in reader.lease.pages[: start // SIZE]:
            assert page in self.contents, "a page that a sequence reads was freed"
        for index in range(start, stop):
            page = reader.lease.pages[index // SIZE]
            readers = [one for one in self.live if page in one.lease.pages]
            assert readers == [reader], "a page that others read was written"
            self.contents[page] = (reader.salt, reader.tokens[: index + 1])
        if features and reader.featured == start:
            reader.featured = stop
        for page in reader.lease.pages[: reader.featured // SIZE]:
            self.with_features.add(page)
        reader.cached = stop
        self.cache.publish(reader.lease, reader.cached, reader.featured)

    @rule(reader=readers, tokens=st.lists(st.integers(0, 1), max_size=5))
    def generate(self, reader: Reader, tokens: list[int]) -> None:
        if reader.cached < len(reader.tokens):
            return
        needed = -(-(len(reader.tokens) + len(tokens)) // SIZE)
        if reader.lease.extend(max(0, needed - len(reader.lease.pages))):
            reader.tokens += tokens

    @rule(reader=consumes(readers))
    def end(self, reader: Reader) -> None:
        self.cache.end(reader.lease, reader.tokens[: reader.cached], reader.featured)
        assert reader.lease.released
        self.live.remove(reader)

    @rule(reader=readers)
    def disown(self, reader: Reader) -> None:
        own = set(reader.lease.own_pages)
        before = len(reader.lease.own_pages)
        self.cache.disown(reader.lease)
        assert len(reader.lease.own_pages) >= before
        self.bad |= own
        reader.trusted = False

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert self.cache.stats().pages == 0
        for salt in "ab":
            assert not self.cache.match([0] * 9, 8, salt).nodes

    @precondition(lambda self: not self.live)
    @rule()
    def everything_can_be_leased(self) -> None:
        assert self.allocator.available_pages == NUM_PAGES
        lease = self.allocator.allocate(NUM_PAGES)
        assert lease is not None
        lease.release()
        assert self.allocator.free_pages == NUM_PAGES
        self.contents.clear()

    @invariant()
    def counts_agree(self) -> None:
        self.allocator.check()
        self.cache.check()
        held = {page for one in self.live for page in one.lease.pages}
        assert self.allocator.available_pages == NUM_PAGES - len(held)


TestPrefixCache = PrefixMachine.TestCase
TestPrefixCache.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def stored(cache: PrefixCache, tokens: list[int], salt: str = "") -> None:
    """Let a sequence compute tokens and end."""
    lease = cache.lease(cache.match(tokens, len(tokens) - 1, salt), -(-len(tokens) // SIZE))
    assert lease is not None
    cache.promise(lease, tokens)
    cache.end(lease, tokens, 0)


def found(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    return len(cache.match(tokens, len(tokens), salt).nodes) * SIZE


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    allocator = PageAllocator(10)
    cache = PrefixCache(allocator, SIZE)
    for text in ([1] * 6, [2] * 6, [3] * 6):
        stored(cache, text)
    stored(cache, [1] * 6)  # used again
    lease = allocator.allocate(5)  # one page is free
    assert lease is not None
    assert [found(cache, [token] * 6) for token in (1, 2, 3)] == [6, 0, 4], "leaves go before their parents"
    assert cache.stats().evicted_pages == 4


def test_a_follower_learns_how_much_is_being_computed_and_by_whom() -> None:
    cache = PrefixCache(PageAllocator(20), SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    leader = cache.lease(cache.match(tokens, 6), 5)
    assert leader is not None
    cache.promise(leader, tokens)
    match = cache.match([*tokens[:4], 9, 9, 9], 6)
    assert (len(match.nodes), match.awaited, match.awaited_from) == (0, 2, leader)
    cache.publish(leader, 3, 0)
    match = cache.match(tokens, 6)
    assert (len(match.nodes), match.awaited) == (1, 2)
    cache.end(leader, tokens[:3], 0)
    match = cache.match(tokens, 6)
    assert (len(match.nodes), match.awaited, match.awaited_from) == (1, 0, None), "nobody computes the rest"


def test_pages_with_features_replace_pages_without() -> None:
    allocator = PageAllocator(20)
    cache = PrefixCache(allocator, SIZE)
    tokens = [1, 2, 3, 4, 5]
    stored(cache, tokens)
    match = cache.match(tokens, 4, with_features=True)
    assert not match.nodes
    lease = cache.lease(match, 3)
    assert lease is not None
    cache.promise(lease, tokens)
    cache.end(lease, tokens, 5)
    assert len(cache.match(tokens, 4, with_features=True).nodes) == 2
    assert allocator.free_pages == 18


def test_a_disabled_cache_keeps_nothing() -> None:
    allocator = PageAllocator(4)
    cache = PrefixCache(allocator, SIZE, enabled=False)
    stored(cache, [1] * 8)
    assert found(cache, [1] * 8) == 0
    assert allocator.free_pages == 4


def test_half_of_the_pages_stay_free_where_consecutive_pages_are_faster() -> None:
    allocator = PageAllocator(20)
    allocator.prefers_runs = True
    cache = PrefixCache(allocator, SIZE)
    for token in range(6):
        stored(cache, [token] * 6)
    assert allocator.free_pages == 10
    assert [found(cache, [token] * 6) for token in range(6)] == [0, 0, 2, 6, 6, 6]


@pytest.mark.parametrize("salts", [300])
def test_salts_of_evicted_prefixes_take_no_memory(salts: int) -> None:
    cache = PrefixCache(PageAllocator(4), SIZE)
    for number in range(salts):
        stored(cache, [1] * 4, str(number))
    cache.check()
    assert cache.stats().pages == 4
    assert found(cache, [1] * 4, str(salts - 1)) == 4
