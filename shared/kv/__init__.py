"""Paged memory for keys, values and features: the page allocator, and the planes that pages index."""

from outrider.shared.kv.pages import PageAllocator, PageLease
from outrider.shared.kv.pool import KVPool, token_bytes

__all__ = ["KVPool", "PageAllocator", "PageLease", "token_bytes"]
