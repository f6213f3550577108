"""Server-sent events, and cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.services.gateway.errors import error_event, error_response, note_error
from outrider.services.gateway.guards.connections import EVENT_STREAM, KEEP_ALIVE
from outrider.shared.base.errors import CancelledError, OutriderError
from outrider.shared.rpc.interceptors import as_outrider_error

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")
_LINE_BREAKS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def encode_event(event: dict[str, Any]) -> bytes:
    """Encode one event as one data line.

    JSON escapes ASCII's line breaks. The other characters that Python's `str.splitlines` treats as line
    breaks are escaped, too, because some clients split events there, for example those that use httpx.
    """
    text = _JSON.encode(event)
    if not text.isascii():
        text = text.translate(_LINE_BREAKS)
    return b"data: " + text.encode("utf-8", "backslashreplace") + b"\n\n"


class EventStream(Response):
    """A streamed HTTP reply that sends the events of a generator as server-sent events, and then [DONE].

    An error before the first event becomes an error reply with the error's status. A later error is sent as
    an event. While no event arrives, comment lines keep the connection alive. When the client disconnects,
    the generator is closed. This cancels the request.
    """

    media_type = "text/event-stream"
    done = DONE

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        keep_alive_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s

    def encode(self, event: dict[str, Any]) -> bytes:
        """Return the bytes of an event."""
        return encode_event(event)

    def failure(self, error: OutriderError) -> dict[str, Any]:
        """Return the event that ends a stream after an error."""
        return error_event(error)

    def refuse(self, error: OutriderError) -> Response:
        """Return the reply for an error before the first event."""
        return error_response(error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(CancelledError):
            await run_until_disconnect(receive, self._stream(scope, receive, send))

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        pending: asyncio.Task[dict[str, Any] | None] | None = None
        try:
            while True:
                pending = pending or asyncio.create_task(_next(self._events))
                done, _ = await asyncio.wait({pending}, timeout=self._keep_alive_s)
                if done:
                    try:
                        event, pending = pending.result(), None
                        data = self.done if event is None else self.encode(event)
                        ended = event is None
                    except Exception as error:
                        failure = as_outrider_error(error)
                        if not begun:
                            await self.refuse(failure)(scope, receive, send)
                            return
                        note_error(scope, failure)
                        data, pending = self.encode(self.failure(failure)) + self.done, None
                        ended = True
                else:
                    data, ended = KEEP_ALIVE, False
                if not begun:
                    begun = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    scope.setdefault("state", {})[EVENT_STREAM] = True
                if ended:
                    scope["state"].pop(EVENT_STREAM)
                await send({"type": "http.response.body", "body": data, "more_body": not ended})
                if ended:
                    return
        finally:
            if pending:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            await self._events.aclose()


class NamedEventStream(EventStream):
    """Sends events with names. The name of an event is the value of its field `type`. No [DONE] follows."""

    done = b""

    def encode(self, event: dict[str, Any]) -> bytes:
        return b"event: " + str(event["type"]).encode("ascii") + b"\n" + encode_event(event)


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, but cancel it when the client disconnects.

    Raises:
        CancelledError: Outrider's own error, with status 499, if the client disconnects.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CancelledError("The client closed the connection.", reason="client_disconnected")
        return task.result()
    finally:
        for one in (watcher, task):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(events, None)
