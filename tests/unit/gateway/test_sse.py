"""Event streams on the wire: one data line per event, and errors before and after the first event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from outrider.services.gateway.sse import EventStream, encode_event, run_until_disconnect
from outrider.shared.base.errors import CancelledError, InvalidRequestError

Events = AsyncGenerator[dict[str, Any], None]


class Client:
    """The two callables that an ASGI application receives."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def read(self, events: Events, keep_alive_s: float = 10.0) -> tuple[int, bytes]:
        await EventStream(events, keep_alive_s)({"type": "http"}, self.receive, self.send)
        return self.sent[0]["status"], b"".join(message.get("body", b"") for message in self.sent)


@pytest.mark.parametrize("text", ["a\nb\r\nc", "data: x\n\n", "a\u2028b\u2029\x85", "é🦊", "\ud800", "\x00"])
def test_an_event_is_one_data_line_whatever_its_text(text: str) -> None:
    encoded = encode_event({"text": text})
    assert encoded.startswith(b"data: ")
    assert encoded.endswith(b"\n\n")
    assert encoded.count(b"\n") == 2
    assert b"\r" not in encoded
    assert len(encoded.decode("utf-8").splitlines()) == 2, "some clients split text at Unicode's line breaks"
    if text != "\ud800":
        assert json.loads(encoded[6:])["text"] == text


async def test_events_then_done() -> None:
    async def events() -> Events:
        yield {"a": 1}
        yield {"a": 2}

    assert await Client().read(events()) == (200, b'data: {"a":1}\n\ndata: {"a":2}\n\ndata: [DONE]\n\n')


async def test_an_error_before_the_first_event_is_the_status_of_the_reply() -> None:
    async def events() -> Events:
        raise InvalidRequestError("wrong", field="x")
        yield {}

    status, body = await Client().read(events())
    assert (status, json.loads(body)["error"]["param"]) == (400, "x")


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidRequestError("wrong"), "invalid_value"), (RuntimeError("secret"), "internal_error")],
)
async def test_a_later_error_is_an_event(error: Exception, code: str) -> None:
    async def events() -> Events:
        yield {"a": 1}
        raise error

    status, body = await Client().read(events())
    first, second, done, rest = body.split(b"\n\n")
    assert (status, first, done, rest) == (200, b'data: {"a":1}', b"data: [DONE]", b"")
    assert json.loads(second[6:])["error"]["code"] == code
    assert b"secret" not in body


async def test_silence_is_filled_with_comments() -> None:
    client = Client()

    async def events() -> Events:
        while len(client.sent) < 3:
            await asyncio.sleep(0)
        yield {"a": 1}

    _, body = await client.read(events(), keep_alive_s=0.001)
    assert body.startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert body.endswith(b'data: {"a":1}\n\ndata: [DONE]\n\n')


async def test_no_comment_waits_behind_an_event_that_the_client_does_not_read() -> None:
    client = Client()
    reads = asyncio.Event()

    async def events() -> Events:
        yield {"a": 1}

    async def slow_send(message: Any) -> None:
        await client.send(message)
        if message.get("body") == b'data: {"a":1}\n\n':
            await reads.wait()

    stream = EventStream(events(), 0.001)({"type": "http"}, client.receive, slow_send)
    task = asyncio.create_task(stream)
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.02  # many times the interval of comments
    while loop.time() < until:
        await asyncio.wait({task}, timeout=0.001)
    reads.set()
    await task
    bodies = [message["body"] for message in client.sent[1:]]
    assert bodies == [b'data: {"a":1}\n\n', b"data: [DONE]\n\n"]


async def test_a_client_that_goes_away_closes_the_generator() -> None:
    client = Client()
    closed = asyncio.Event()

    async def events() -> Events:
        try:
            yield {"a": 1}
            client.gone.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    await client.read(events())
    assert closed.is_set()
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in client.sent)


async def test_work_is_cancelled_when_the_client_goes_away_and_returned_otherwise() -> None:
    client = Client()
    cancelled = asyncio.Event()

    async def work() -> int:
        client.gone.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return 1

    with pytest.raises(CancelledError):
        await run_until_disconnect(client.receive, work())
    assert cancelled.is_set()

    async def quick() -> int:
        return 7

    assert await run_until_disconnect(Client().receive, quick()) == 7
