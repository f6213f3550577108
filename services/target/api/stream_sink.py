"""Passes the events of the engine thread to the coroutine of one call, and reports unread backlogs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Seq

from outrider.services.target.request import Event, EventSink, TokensEvent

MAX_UNREAD_BYTES = 64 * 1024
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""A list of events is divided if its messages would be larger, because a gRPC message has a limited size."""
TOKEN_BYTES = 8
"""Approximate size of one token in an unread message."""


class StreamSink(EventSink):
    """Passes events from the engine thread to the asyncio coroutine that serves one call.

    The sink wakes the event loop at most once per engine step.

    Args:
        on_backlog: Called with True when more than 64 KiB of events are unread. Called with False once at
            most 32 KiB are unread.
    """

    def __init__(self, on_backlog: Callable[[bool], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Seq[Event]] = asyncio.Queue()
        self._closed = False
        self._on_backlog = on_backlog
        self._unread = 0
        self._backlog = False

    def deliver(self, events: Seq[Event]) -> None:
        """Queue the events of one engine step. May be called from any thread."""
        # A closed event loop has no reader left, so the events can be dropped.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.put, events)

    def put(self, events: Seq[Event]) -> None:
        """Queue events. Call on the event loop only."""
        self._unread += _size(events)
        self._queue.put_nowait(events)
        if self._on_backlog and not self._backlog and self._unread > MAX_UNREAD_BYTES:
            self._backlog = True
            self._on_backlog(True)

    def close(self) -> None:
        """End `batches` once the queued events are read. Call on the event loop only."""
        self._closed = True
        self._queue.put_nowait(())

    async def batches(self) -> AsyncIterator[Seq[Event]]:
        """Yield the call's events in order, as lists. Each list starts where the previous list ended.

        A list has at most `MAX_BATCH_BYTES` bytes. An event that is larger is yielded alone.
        """
        while not self._closed or not self._queue.empty():
            merged: list[Event] = list(await self._queue.get())
            while not self._queue.empty():
                merged.extend(self._queue.get_nowait())
            if not merged:
                continue
            size = _size(merged)
            self._unread -= size
            for part in [merged] if size <= MAX_BATCH_BYTES else _parts(merged):
                yield part
            if self._on_backlog and self._backlog and self._unread <= MAX_UNREAD_BYTES // 2:
                self._backlog = False
                self._on_backlog(False)


def _parts(events: list[Event]) -> Iterator[list[Event]]:
    part: list[Event] = []
    size = 0
    for event in events:
        more = _size([event])
        if part and size + more > MAX_BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append(event)
        size += more
    yield part


def _size(events: Iterable[Event]) -> int:
    return sum(
        TOKEN_BYTES * len(event.token_ids)
        + sum(
            TOKEN_BYTES * (1 + len(one.top_ids) + len(one.requested))
            for one in (*event.logprobs, *event.prompt_logprobs)
        )
        + (event.states.nbytes if event.states is not None else 0)
        for event in events
        if isinstance(event, TokensEvent)
    )
