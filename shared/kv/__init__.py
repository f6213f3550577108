"""Paged memory for keys, values and features: page allocator, planes, and the cache of stored prefixes."""

from outrider.shared.kv.pages import PageAllocator, PageLease
from outrider.shared.kv.pool import KVPool, token_bytes
from outrider.shared.kv.prefix_cache import PrefixCache

__all__ = ["KVPool", "PageAllocator", "PageLease", "PrefixCache", "token_bytes"]
