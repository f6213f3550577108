"""Limits each tenant's share of a bounded queue, so that a flood of one tenant leaves room for the others."""

from __future__ import annotations

SHARE = 3
"""Largest ratio of a tenant's part of the queue to the free part.

With 3, one tenant alone can fill three quarters of the queue.
"""


def exceeds_share(held: int, total: int, limit: int) -> bool:
    """Return True if a tenant would exceed its share of a queue.

    One tenant alone may hold 3/4 of the queue, each of two tenants 3/7, each of three 3/10, and so on. A new
    tenant always finds room.

    Args:
        held: Number of requests or tokens of this tenant, including the new ones.
        total: Number of requests or tokens of all tenants, without the new ones of this tenant.
        limit: Size of the queue.

    >>> exceeds_share(held=75, total=74, limit=100), exceeds_share(held=80, total=79, limit=100)
    (False, True)
    """
    return held > SHARE * (limit - total)
