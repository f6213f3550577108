"""Keeps the K/V of token prefixes that sequences have computed, so that others need not compute them again.

Life of a stored page (see `prefix_tree` for the tree of pages):

1. `lease` gives a new sequence the pages of its longest stored prefix, and further pages of its own.
2. `promise` adds the own pages that the prompt will fill to the tree. Other sequences then know that the
   pages are being computed, and can wait for them. `publish` lets other sequences read them.
3. `end` adds the full pages that the sequence has filled since then, and ends the lease.
4. The allocator evicts pages that no lease reads when it needs pages: the least recently used first, and
   leaves before their parents.

Only full pages whose tokens are all committed are read by others, and a prefix ends before the last token of
a sequence. Therefore no pass writes a page that another sequence reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.shared.kv.pages import PageAllocator, PageLease
from outrider.shared.kv.prefix_tree import PrefixNode, PrefixTree


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest stored prefix of a sequence.

    Attributes:
        salt: The salt of the tree.
        nodes: The stored pages, in order.
        awaited: Number of further pages of the sequence that another sequence is computing.
        awaited_from: The lease of that sequence. None if `awaited` is 0.
    """

    salt: str
    nodes: Sequence[PrefixNode] = ()
    awaited: int = 0
    awaited_from: PageLease | None = None

    @property
    def feature_pages(self) -> int:
        """Number of leading pages whose feature rows are stored."""
        lacking = (index for index, node in enumerate(self.nodes) if not node.has_features)
        return next(lacking, len(self.nodes))


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """A snapshot of a prefix cache.

    Attributes:
        enabled: False if the cache is turned off.
        queried_tokens, hit_tokens: Number of prompt tokens of admitted requests, and number of those whose
            K/V was stored already.
        pages: Number of stored pages that sequences can find.
        evicted_pages: Number of pages that were evicted because other pages were needed.
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
        salt: The salt of the tree.
        nodes: The nodes, in the order of the lease's pages.
        found: Number of leading nodes that were in the tree before the lease.
        published: Number of leading nodes that other sequences may read.
        trusted: False if no further pages of the sequence may be stored.
    """

    salt: str
    nodes: list[PrefixNode] = field(default_factory=list)
    found: int = 0
    published: int = 0
    trusted: bool = True


class PrefixCache:
    """The stored prefixes of one pool, and the leases that use them. The allocator's thread owns the cache.

    Args:
        allocator: The pages.
        page_size: Tokens per page.
        enabled: False stores nothing and finds nothing.

    Attributes:
        queried_tokens, hit_tokens: Number of prompt tokens that requests have looked up, and that they have
            found. The scheduler counts them.
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
            limit: Largest number of tokens of the prefix.
            salt: Selects the tree.
            with_features: True to find only pages whose feature rows are stored.
        """
        node, pages = self._tree.find_root(salt), limit // self._page_size
        # Most misses differ in the first page, so look that page up alone.
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
        """Lease the pages of a prefix, and pages of its own for a total of `num_pages`.

        Args:
            match: The prefix. The cache has not changed since `match` returned it.
            num_pages: Number of pages of the lease, more than those of the prefix.
            spare: Number of pages that must remain available.

        Returns:
            None, without any change, if too few pages are available.
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
        """Add the full pages of these tokens to the tree, which the sequence of a lease is about to compute.

        The first page that the tree has already, and all pages after it, are left out.
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
        """Let other sequences read the promised pages below `cached_len`.

        The passes that write these pages must be enqueued already.

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

    def end(self, lease: PageLease, tokens: Sequence[int], feature_len: int) -> None:
        """Store the full pages of a sequence that ends or gives up its pages, and end its lease.

        Args:
            lease: The lease.
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
        """Remove the pages that a lease has added, and all pages after them, from the tree.

        Call this if the contents of these pages may be wrong. Pages that only this lease reads become its
        own. The sequence stores no pages at its end.
        """
        path = self._paths.get(lease)
        if path is None:
            return
        path.trusted = False
        if path.found < len(path.nodes):
            self._tree.remove(path.nodes[path.found])
        self.take_back(lease)

    def take_back(self, lease: PageLease) -> bool:
        """Make the pages outside the tree that only this lease reads its own.

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
        """Add the full pages after a path to the tree. Return the lease's own pages that are left over."""
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
    """Return how many nodes below a node these keys name, one below the other."""
    depth = 0
    for key in keys:
        child = node.children.get(key)
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
