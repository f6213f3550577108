"""Prefix cache: keeps the K/V that sequences have computed, for other sequences with the same prefix.

Life of a stored page (see `prefix_tree` for the tree of pages):

1. `lease` leases the pages of a new sequence: the stored pages of its longest known prefix, then new pages.
2. `promise` adds new pages to the tree if the prompt will fill them. Other sequences can then wait for these
   pages. `publish` lets other sequences read them.
3. `end` adds the pages that the sequence has filled since `promise` was called, and ends the lease.
4. When the allocator needs pages, it evicts stored pages that no lease reads, the least recently used first.
   A page is evicted only after all its children in the tree.

A shared page is full, and all of its tokens are committed. Forward passes therefore never write a page that
another sequence reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.shared.kv.pages import PageAllocator, PageLease
from outrider.shared.kv.prefix_tree import PrefixNode, PrefixTree


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Result of a search in the prefix cache: the longest stored prefix of a sequence.

    Attributes:
        salt: Selects the tree that was searched (see `prefix_tree`).
        nodes: The stored pages, in order.
        awaited: Number of pages that follow the stored pages and that another sequence is computing.
        awaited_from: The lease of the sequence that is computing these pages. None if `awaited` is 0.
    """

    salt: str
    nodes: Sequence[PrefixNode] = ()
    awaited: int = 0
    awaited_from: PageLease | None = None

    @property
    def feature_pages(self) -> int:
        """Number of leading pages of the prefix whose feature rows are stored."""
        lacking = (index for index, node in enumerate(self.nodes) if not node.has_features)
        return next(lacking, len(self.nodes))


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Statistics of a prefix cache at one moment.

    Attributes:
        enabled: False if the cache is turned off.
        queried_tokens, hit_tokens: Number of prompt tokens of admitted requests, and how many of these tokens
            had stored K/V.
        pages: Number of stored pages that sequences can find.
        evicted_pages: Number of pages that were evicted to make room for other pages.
    """

    enabled: bool = False
    queried_tokens: int = 0
    hit_tokens: int = 0
    pages: int = 0
    evicted_pages: int = 0


@dataclass(slots=True)
class _Path:
    """The nodes that a lease pins.

    Attributes:
        salt: Selects the tree that contains the nodes.
        nodes: The nodes, in the order of the lease's pages.
        found: Number of leading nodes that were in the tree when the lease began.
        published: Number of leading nodes that other sequences may read.
        trusted: False if the sequence must not add further pages to the tree.
    """

    salt: str
    nodes: list[PrefixNode] = field(default_factory=list)
    found: int = 0
    published: int = 0
    trusted: bool = True


class PrefixCache:
    """The stored prefixes of one KV pool, and the leases that use them. Use it on the engine thread only.

    Args:
        allocator: Allocator of the KV pool's pages.
        page_size: Number of tokens per page.
        enabled: If False, the cache stores nothing and finds nothing.

    Attributes:
        queried_tokens, hit_tokens: Number of prompt tokens that requests have looked up, and how many of
            these tokens had stored K/V. The scheduler adds to these counts.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.queried_tokens = self.hit_tokens = 0
        self._allocator = allocator
        self._page_size = page_size
        self._tree = PrefixTree(allocator, page_size)
        self._paths: dict[PageLease, _Path] = {}

    def stats(self) -> PrefixStats:
        """Return a snapshot of the counts. Other threads may call this method."""
        return PrefixStats(
            self.enabled, self.queried_tokens, self.hit_tokens, self._tree.num_nodes, self._tree.evicted_pages
        )

    def start_counting(self) -> None:
        """Reset the counts."""
        self.queried_tokens = self.hit_tokens = self._tree.evicted_pages = 0

    def match(
        self, tokens: Sequence[int], limit: int, salt: str = "", *, with_features: bool = False
    ) -> PrefixMatch:
        """Find the longest stored prefix of ``tokens[:limit]``.

        Args:
            tokens: The tokens of a sequence.
            limit: Largest number of tokens that the prefix may have.
            salt: Selects the tree to search. A prefix is found only under the salt with which it was stored.
            with_features: True to find only pages whose feature rows are stored too.
        """
        node, pages = self._tree.find_root(salt), limit // self._page_size
        # Most misses already differ in the first page, so look up the first page alone before the others.
        if node is None or pages < 1 or next(self._tree.keys(tokens, 0, 1)) not in node.children:
            return PrefixMatch(salt)
        found: list[PrefixNode] = []
        keys = self._tree.keys(tokens, 0, pages)
        for key in keys:
            child = node.children.get(key)
            if child is None or (with_features and child.promised_by is None and not child.has_features):
                break
            if child.promised_by is not None:
                return PrefixMatch(salt, found, 1 + _depth(child, keys), child.promised_by)
            found.append(child)
            node = child
        return PrefixMatch(salt, found)

    def lease(self, match: PrefixMatch, num_pages: int, spare: int = 0) -> PageLease | None:
        """Lease `num_pages` pages for a sequence: the stored pages of its prefix, then new pages.

        Args:
            match: The prefix. The cache must not have changed since `match` returned it.
            num_pages: Total number of pages of the lease, which must exceed the number of pages of the
                prefix.
            spare: Number of other pages that must remain available.

        Returns:
            The lease. None if too few pages are available, in which case nothing has changed.
        """
        nodes, new = list(match.nodes), num_pages - len(match.nodes)
        self._tree.pin(nodes)
        lease = None
        if new + spare <= self._allocator.available_pages:
            lease = self._allocator.allocate(new, [node.page for node in nodes])
        if lease is None:
            self._tree.unpin(nodes)
            return None
        self._paths[lease] = _Path(match.salt, nodes, len(nodes), len(nodes))
        return lease

    def promise(self, lease: PageLease, tokens: Sequence[int]) -> None:
        """Add the full pages of these tokens to the tree before the sequence of the lease computes them.

        If the tree already has one of these pages from another sequence, this page and all later pages are
        not added.
        """
        path, stop = self._paths[lease], len(tokens) // self._page_size
        if not self.enabled or stop <= len(path.nodes):
            return
        node = path.nodes[-1] if path.nodes else self._tree.root(path.salt)
        for key in self._tree.keys(tokens, len(path.nodes), stop):
            if key in node.children:
                break
            node = self._tree.insert(node, key, lease.pages[len(path.nodes)])
            node.promised_by = lease
            path.nodes.append(node)
            self._tree.pin([node])
        lease.shared = len(path.nodes)

    def publish(self, lease: PageLease, cached_len: int, feature_len: int) -> None:
        """Let other sequences read a lease's promised pages within the first `cached_len` tokens.

        Call this only after the forward passes that write these pages have been enqueued.

        Args:
            lease: The lease of the sequence that has computed the pages.
            cached_len: Number of tokens whose K/V is stored.
            feature_len: Number of tokens whose feature rows are stored.
        """
        path = self._paths.get(lease)
        if path is None:
            return
        while path.published < min(len(path.nodes), cached_len // self._page_size):
            node = path.nodes[path.published]
            path.published += 1
            node.promised_by = None
            node.has_features = path.published * self._page_size <= feature_len

    def share(self, lease: PageLease, tokens: Sequence[int]) -> None:
        """Let other sequences read the full pages of a sequence that is still running.

        Args:
            lease: The lease of the sequence.
            tokens: The tokens whose K/V is stored. The forward passes that write this K/V must have been
                enqueued.
        """
        path = self._paths.get(lease)
        if path is None or not path.trusted or (path.nodes and path.nodes[-1].parent is None):
            return  # the tree no longer has the beginning of the sequence
        self.promise(lease, tokens)
        self.publish(lease, len(tokens), len(tokens))

    def forget(self, tokens: Sequence[int], kept: int, salt: str = "") -> None:
        """Remove from the cache the pages of a sequence that come after its first `kept` tokens.

        Pages that a sequence still reads are not removed. If a page is removed, its descendants in the tree
        are removed too.
        """
        node, pages = self._tree.find_root(salt), len(tokens) // self._page_size
        if node is None or pages < 1 or next(self._tree.keys(tokens, 0, 1)) not in node.children:
            return
        for index, key in enumerate(self._tree.keys(tokens, 0, pages)):
            child = node.children.get(key)
            if child is None:
                return
            if index >= kept // self._page_size and not child.pins:
                self._tree.remove(child)
                return
            node = child

    def end(self, lease: PageLease, tokens: Sequence[int], feature_len: int) -> None:
        """Store the full pages of a sequence that has ended or is preempted, and end its lease.

        Args:
            lease: The lease of the sequence.
            tokens: The tokens whose K/V is stored.
            feature_len: Number of tokens whose feature rows are stored.
        """
        self.publish(lease, len(tokens), feature_len)
        path = self._paths.pop(lease, None)
        if path is None:
            lease.release()
            return
        self._tree.time += 1
        for node in path.nodes:
            node.used = self._tree.time
        freed = lease.own_pages
        if path.published < len(path.nodes):
            self._tree.remove(path.nodes[path.published])
        elif path.trusted and self.enabled and not (path.nodes and path.nodes[-1].parent is None):
            freed = self._store(path, lease, tokens, feature_len)
        lease.end(freed)
        self._tree.unpin(path.nodes)
        self._tree.trim()

    def disown(self, lease: PageLease) -> None:
        """Remove from the tree the pages that a lease has added, and all pages below these pages.

        Call this if the contents of these pages may be wrong. Afterwards, the lease owns the removed pages,
        except those that other leases read. When the sequence ends, none of its pages are stored.
        """
        path = self._paths.get(lease)
        if path is None:
            return
        path.trusted = False
        if path.found < len(path.nodes):
            self._tree.remove(path.nodes[path.found])
        self.take_back(lease)

    def take_back(self, lease: PageLease) -> bool:
        """Make a lease the owner of its last pages that are outside the tree and that no other lease reads.

        Return True if the lease then owns all of its pages.
        """
        path = self._paths.get(lease)
        if path is None:
            return True
        while path.nodes and self._tree.take_out(path.nodes[-1]):
            path.nodes.pop()
        path.published = min(path.published, len(path.nodes))
        lease.shared = len(path.nodes)
        return not path.nodes

    def flush(self) -> int:
        """Empty the cache, and return the number of pages removed.

        Sequences in progress keep their pages, but no other sequence will find these pages.
        """
        removed = self._tree.num_nodes
        self._tree.clear()
        for path in self._paths.values():
            path.trusted = False
        return removed

    def check(self) -> None:
        """Assert that the tree, the leases and the counts agree."""
        pins: dict[PrefixNode, int] = {}
        for lease, path in self._paths.items():
            assert not lease.released
            assert [node.page for node in path.nodes] == lease.pages[: lease.shared]
            for index, node in enumerate(path.nodes):
                pins[node] = pins.get(node, 0) + 1
                assert (node.promised_by is None) == (index < path.published)
        self._tree.check(pins)

    def _store(self, path: _Path, lease: PageLease, tokens: Sequence[int], feature_len: int) -> list[int]:
        """Add the full pages after a path to the tree. Return the lease's pages that were not added."""
        known, stop = len(path.nodes), len(tokens) // self._page_size
        freed = lease.pages[max(known, stop) :]
        if known >= stop:
            return freed
        node = path.nodes[-1] if path.nodes else self._tree.root(path.salt)
        for index, key in enumerate(self._tree.keys(tokens, known, stop), known):
            has_features = (index + 1) * self._page_size <= feature_len
            child, page = node.children.get(key), lease.pages[index]
            if child is None:
                child = self._tree.insert(node, key, page)
                child.has_features = has_features
            elif has_features and not (child.has_features or child.pins):
                freed.append(child.page)
                child.page, child.has_features = page, True
            else:
                freed.append(page)
            child.used = self._tree.time
            node = child
        self._tree.note_leaf(node)
        return freed


def _depth(node: PrefixNode, keys: Iterator[bytes]) -> int:
    """Return how many nodes the path from `node` along these keys has in the tree, without `node`."""
    depth = 0
    for key in keys:
        child = node.children.get(key)
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
