"""Divides a bounded queue between tenants, so that a flood of one tenant leaves room for the others."""

from __future__ import annotations

SHARE = 3
"""A tenant may hold this many times the room that is left. A single one fills three quarters of the queue."""


def exceeds_share(held: int, total: int, limit: int) -> bool:
    """Return True if a tenant would hold more of a queue than it may.

    One tenant alone may hold 3/4 of the queue, each of two tenants 3/7, each of three 3/10, and so on. A new
    tenant always finds room.

    Args:
        held: What the tenant would hold, including what it wants to add.
        total: What all tenants hold, without what this tenant wants to add.
        limit: Size of the queue.

    >>> exceeds_share(held=75, total=74, limit=100), exceeds_share(held=80, total=79, limit=100)
    (False, True)
    """
    return held > SHARE * (limit - total)
