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


def json_line(value: Any) -> str:
    """Return a value as JSON without line breaks.

    JSON escapes ASCII's line breaks. The other characters that Python's `str.splitlines` treats as line
    breaks are escaped, too, because some clients split events there, for example those that use httpx.
    """
    text = _JSON.encode(value)
    return text if text.isascii() else text.translate(_LINE_BREAKS)


def encode_event(event: dict[str, Any] | str) -> bytes:
    """Encode one event as one data line. An event that is text is JSON already, from `json_line`."""
    text = event if isinstance(event, str) else json_line(event)
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
        events: AsyncGenerator[dict[str, Any] | str, None],
        keep_alive_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s

    def encode(self, event: dict[str, Any] | str) -> bytes:
        """Return the bytes of an event. An event that is text is JSON already, from `json_line`."""
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
        reply = _Reply(scope, send, self.raw_headers)
        # A task for the comments costs less than a timeout for each event.
        comments = asyncio.create_task(reply.fill_silence(self._keep_alive_s))
        ended = False
        try:
            while not ended:
                try:
                    event = await anext(self._events, None)
                    data = self.done if event is None else self.encode(event)
                    ended = event is None
                except Exception as error:
                    failure = as_outrider_error(error)
                    if not reply.begun:
                        comments.cancel()
                        await self.refuse(failure)(scope, receive, send)
                        return
                    note_error(scope, failure)
                    data, ended = self.encode(self.failure(failure)) + self.done, True
                await reply.send(data, ended)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)
            await self._events.aclose()


class _Reply:
    """The messages of one streamed reply.

    Attributes:
        begun: Whether the status of the reply has been sent.
    """

    def __init__(self, scope: Scope, send: Send, raw_headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = False
        self._scope = scope
        self._send = send
        self._raw_headers = raw_headers
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()
        self._sending = asyncio.Lock()

    async def send(self, data: bytes, ended: bool = False) -> None:
        """Send a part of the body, and the status before the first part."""
        async with self._sending:
            if not self.begun:
                self.begun = True
                head = {"type": "http.response.start", "status": 200, "headers": self._raw_headers}
                await self._send(head)
                self._scope.setdefault("state", {})[EVENT_STREAM] = True
            if ended:
                self._scope["state"].pop(EVENT_STREAM)
            await self._send({"type": "http.response.body", "body": data, "more_body": not ended})
            self._last = self._clock()

    async def fill_silence(self, keep_alive_s: float) -> None:
        """Send a comment whenever nothing has been sent for `keep_alive_s` seconds, until cancelled."""
        while True:
            wait_s = self._last + keep_alive_s - self._clock()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif self._sending.locked():
                await asyncio.sleep(keep_alive_s)
            else:
                await self.send(KEEP_ALIVE)


class NamedEventStream(EventStream):
    """Sends events with names. The name of an event is the value of its field `type`. No [DONE] follows."""

    done = b""

    def encode(self, event: dict[str, Any] | str) -> bytes:
        assert isinstance(event, dict), "the name of an event is a field"
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
