"""The routes for operators. If keys are configured, these routes need an admin key."""

from __future__ import annotations

ADMIN_PATHS = frozenset(["/flush_cache", "/metrics", "/status.json"])
"""Routes that change the server for all callers, or show data of all callers.

The route `/abort_request` and the gRPC call `Abort` are open to all keys. They abort the requests of other
keys only if the caller has an admin key.
"""
