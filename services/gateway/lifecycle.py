"""Records whether the gateway accepts requests, and how many requests run."""

from __future__ import annotations

import asyncio


class Lifecycle:
    """Records whether the gateway accepts requests, and how many requests run.

    Attributes:
        draining: True once shutdown has begun. The gateway then reports that it is not ready.
        admitting: True while the gateway accepts new requests.
        idle: Event that is set while no request is running.
    """

    def __init__(self) -> None:
        self.draining = False
        self.admitting = True
        self.idle = asyncio.Event()
        self.idle.set()
        self._running = 0

    def began(self) -> None:
        """Count a request."""
        self._running += 1
        self.idle.clear()

    def ended(self) -> None:
        """Stop counting a request."""
        self._running -= 1
        if not self._running:
            self.idle.set()
