"""Bounds the bytes of requests that a client sends before it has the reply to an earlier request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class BoundedReading(FlowControl):
    """uvicorn's flow control, which reads no more while a connection has enough unparsed bytes.

    Unparsed bytes are requests that the client has sent before the reply to the running one (pipelining).
    uvicorn's own class would read more of them each time that a route waits for the client.

    Args:
        transport: Transport of the connection.
        is_full: Function that returns True while the connection has enough unparsed bytes.
    """

    def __init__(self, transport: asyncio.Transport, is_full: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_full = is_full

    def resume_reading(self) -> None:
        """Read again, unless there are enough unparsed bytes. uvicorn asks again after each reply."""
        if not self._is_full():
            super().resume_reading()
