"""The tree of a prefix cache: adds, pins, removes and evicts nodes. Each node is one full page of tokens.

There is one tree per salt. A salt is a text that separates requests whose prefixes must not be shared. The
path from the root of a tree to a node is a prefix. The node is the last page of this prefix.

    root ── tokens 0-15 ──┬── tokens 16-31 ── tokens 32-47
                          └── tokens 16-31 (other tokens)

Leases *pin* the nodes that their sequences read. The nodes of a lease form a path from the root, so a node
that is not pinned has no pinned descendant. A pinned node that is removed stays outside the tree until its
last lease ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from outrider.shared.kv.pages import PageAllocator, PageLease, PageStore

TOKEN_CODE = "I"
TOKEN_BYTES = array(TOKEN_CODE).itemsize
ENTRIES_PER_NODE = 2
SPARE_ENTRIES = 64
"""The list of leaves is cleaned up when its length exceeds `ENTRIES_PER_NODE` per node plus this number."""


class PrefixNode:
    """One node of a prefix tree: a stored page.

    Attributes:
        key: The tokens of the page. For a root, the salt.
        page: The page number. -1 for a root.
        parent: The node of the preceding page. None for a root, and for a node outside the tree.
        children: The nodes of the pages that may follow, by their keys.
        pins: Number of leases that read the page.
        promised_by: The lease whose sequence is computing the page. None as soon as other sequences may read
            the page.
        has_features: True if the feature rows of the page are stored as well.
        used: Value of `PrefixTree.time` at the last use.
    """

    __slots__ = ("children", "has_features", "key", "page", "parent", "pins", "promised_by", "used")

    def __init__(self, key: bytes, page: int, parent: PrefixNode | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, PrefixNode] = {}
        self.pins = 0
        self.promised_by: PageLease | None = None
        self.has_features = False
        self.used = 0

    def __lt__(self, other: PrefixNode) -> bool:
        return self.page < other.page


class PrefixTree(PageStore):
    """The prefix trees of all salts, for one KV pool. Not thread-safe: use it on the engine thread only.

    Args:
        allocator: Allocator of the KV pool's pages. This object becomes the allocator's page store.
        page_size: Number of tokens per page.

    Attributes:
        time: Number of ended leases, which serves as a clock. Nodes with the lowest `used` are evicted first.
        num_nodes: Number of nodes in the trees.
        evicted_pages: Number of pages that were evicted to make room for other pages.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.time = self.num_nodes = self.evicted_pages = 0
        self._allocator = allocator
        self._page_size = page_size
        self._roots: dict[bytes, PrefixNode] = {}
        self._outside: set[PrefixNode] = set()  # nodes that were removed but are still pinned
        self._leaves: list[tuple[int, PrefixNode]] = []  # a heap, whose entries may be out of date
        self._evictable = 0
        allocator.store = self

    @property
    def evictable(self) -> int:
        return self._evictable

    def find_root(self, salt: str) -> PrefixNode | None:
        """Return the root of a salt's tree, or None if the tree has no pages."""
        return self._roots.get(salt.encode())

    def root(self, salt: str) -> PrefixNode:
        """Return the root of a salt's tree. If there was no tree, the caller has to add a node to it."""
        key = salt.encode()
        if key not in self._roots:
            self._roots[key] = PrefixNode(key, -1, None)
        return self._roots[key]

    def keys(self, tokens: Sequence[int], first: int, stop: int) -> Iterator[bytes]:
        """Yield the keys of pages ``[first, stop)``, all of which must be full."""
        data = array(TOKEN_CODE, tokens[first * self._page_size : stop * self._page_size]).tobytes()
        width = self._page_size * TOKEN_BYTES
        for start in range(0, len(data), width):
            yield data[start : start + width]

    def insert(self, parent: PrefixNode, key: bytes, page: int) -> PrefixNode:
        """Add an unpinned node for a page. If it stays a leaf, call `note_leaf` when it may be evicted."""
        node = parent.children[key] = PrefixNode(key, page, parent)
        node.used = self.time
        self.num_nodes += 1
        self._evictable += 1
        return node

    def remove(self, top: PrefixNode) -> None:
        """Remove a node and its descendants from the tree, and free the pages of those that are not pinned.

        Do nothing if the node is outside the tree already.
        """
        if top.parent is None:
            return
        parent, rest = top.parent, [top]
        freed: list[int] = []
        del parent.children[top.key]
        while rest:
            node = rest.pop()
            rest.extend(node.children.values())
            node.children = {}
            node.parent = None
            self.num_nodes -= 1
            if node.pins:
                self._outside.add(node)
            else:
                self._evictable -= 1
                freed.append(node.page)
        self._allocator.give_back(freed)
        self.note_leaf(parent)
        self._drop_if_empty(parent)

    def clear(self) -> None:
        """Remove all nodes."""
        for root in list(self._roots.values()):
            for child in list(root.children.values()):
                self.remove(child)
        self._leaves.clear()

    def pin(self, nodes: Sequence[PrefixNode]) -> None:
        """Protect nodes of the tree from eviction."""
        for node in nodes:
            if not node.pins:
                self._evictable -= 1
            node.pins += 1

    def unpin(self, nodes: Sequence[PrefixNode]) -> None:
        """Undo one `pin` of each node. When a node outside the tree loses its last pin, its page is freed."""
        for node in reversed(nodes):
            node.pins -= 1
            if node.pins:
                continue
            if node in self._outside:
                self._outside.remove(node)
                self._allocator.give_back([node.page])
            else:
                self._evictable += 1
                self.note_leaf(node)

    def take_out(self, node: PrefixNode) -> bool:
        """Make the caller the owner of a node's page, if the node is outside the tree and pinned only once.

        For any other node, change nothing and return False.
        """
        if node.pins != 1 or node not in self._outside:
            return False
        self._outside.remove(node)
        return True

    def note_leaf(self, node: PrefixNode) -> None:
        """Add a node to the list of leaves, if the node can be evicted now."""
        if node.children or node.pins or node.parent is None:
            return
        if len(self._leaves) > ENTRIES_PER_NODE * self.num_nodes + SPARE_ENTRIES:
            current = {id(one): (used, one) for used, one in self._leaves if one.used == used}
            self._leaves = list(current.values())
            heapify(self._leaves)
        heappush(self._leaves, (node.used, node))

    def trim(self) -> None:
        """If the allocator prefers runs, evict pages until unpinned ones take at most half of the pool."""
        surplus = self._evictable - self._allocator.num_pages // 2
        if self._allocator.prefers_runs and surplus > 0:
            self._allocator.give_back(self.evict(surplus))

    def evict(self, n: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < n:
            used, node = heappop(self._leaves)
            parent = node.parent
            if parent is None or node.pins or node.children or node.used != used:
                continue
            del parent.children[node.key]
            node.parent = None
            pages.append(node.page)
            self.num_nodes -= 1
            self._evictable -= 1
            self.note_leaf(parent)
            self._drop_if_empty(parent)
        self.evicted_pages += n
        return pages

    def stored_pages(self) -> list[int]:
        return [node.page for node in (*self.nodes(), *self._outside)]

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield all nodes in the trees."""
        rest = list(self._roots.values())
        while rest:
            node = rest.pop()
            rest.extend(node.children.values())
            if node.page >= 0:
                yield node

    def check(self, pins: dict[PrefixNode, int]) -> None:
        """Assert that nodes, pins and counts agree.

        Args:
            pins: The number of leases that read each pinned node.
        """
        nodes = list(self.nodes())
        assert all(node.pins == pins.get(node, 0) for node in (*nodes, *self._outside))
        assert pins.keys() <= {*nodes, *self._outside}, "a lease reads a page that is not stored"
        for node in nodes:
            assert node.pins or node.promised_by is None, "a promised page must be in use"
            assert all(child.parent is node and child.pins <= node.pins for child in node.children.values())
        assert all(node.pins and node.parent is None for node in self._outside)
        assert all(root.children for root in self._roots.values()), "an empty tree is left"
        assert self.num_nodes == len(nodes)
        assert self._evictable == sum(not node.pins for node in nodes)
        noted = {id(node) for used, node in self._leaves if node.used == used}
        for node in nodes:
            assert node.pins or node.children or id(node) in noted, "a leaf cannot be found for eviction"

    def _drop_if_empty(self, node: PrefixNode) -> None:
        """Remove the tree of a salt if the tree has no pages left."""
        if node.page < 0 and not node.children:
            self._roots.pop(node.key, None)
