"""Sends the requests of `questions`, reads their answers, and compares them with the expected ones."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx

from outrider.bench.faults.questions import CHAT, GENERATE, Question
from outrider.bench.load.server import QUOTED_CHARS, key_headers

TIMEOUT_S = 120.0
AnswerPart = tuple[int, ...] | str
"""Tokens or text of one answer of a request."""


class RequestEnding(Enum):
    """How a request ended."""

    RIGHT = "right"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class RequestVerdict:
    """How a request ended, with the error of a failed or wrong one."""

    outcome: RequestEnding
    detail: str = ""


class AskFailedError(Exception):
    """A request was refused, or its answer broke off.

    Attributes:
        parts: What arrived before.
        retry_after: The header Retry-After of a reply with status 429, else None.
    """

    def __init__(
        self, reason: str, parts: Mapping[int, AnswerPart] | None = None, retry_after: str | None = None
    ) -> None:
        super().__init__(reason)
        self.parts = dict(parts or {})
        self.retry_after = retry_after


class Asker:
    """HTTP client that sends requests to one server. Create it inside the running event loop, and close it.

    Args:
        url: Address of the server.
        api_key: API key to send, or None.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=key_headers(api_key),
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def whole(self, question: Question, speculation: Mapping[str, Any]) -> dict[int, AnswerPart]:
        """Return the answers of a request that does not stream, by index.

        Raises:
            AskFailedError: The request was refused, or the connection broke.
        """
        try:
            reply = await self._http.post(question.path, json=question.sent(speculation, False))
        except httpx.TransportError as error:
            raise AskFailedError(f"{type(error).__name__} {error}") from None
        if reply.status_code != httpx.codes.OK:
            raise _refusal(reply, reply.text)
        found = reply.json()
        if question.path == GENERATE:
            return {0: tuple(found["output_ids"])}
        return {choice["index"]: _text(question, choice, "message") for choice in found["choices"]}

    async def pieces(
        self, question: Question, speculation: Mapping[str, Any]
    ) -> AsyncGenerator[dict[int, AnswerPart], None]:
        """Send a streamed request. After each event of the stream, yield the answers received so far.

        Close the generator to cancel the request.

        Raises:
            AskFailedError: The request was refused, or its stream did not end properly.
        """
        parts: dict[int, AnswerPart] = {}
        body = question.sent(speculation, True)
        ended = False
        try:
            async with self._http.stream("POST", question.path, json=body) as reply:
                if reply.status_code != httpx.codes.OK:
                    raise _refusal(reply, (await reply.aread()).decode(errors="replace"))
                async with aclosing(reply.aiter_lines()) as lines:  # type: ignore[type-var]
                    async for line in lines:
                        data = line.removeprefix("data:").strip()
                        if not line.startswith("data:"):
                            continue
                        if data == "[DONE]":
                            ended = True
                            continue
                        event = json.loads(data)
                        if "error" in event:
                            raise AskFailedError(f"error event: {data[:QUOTED_CHARS]}", parts)
                        _collect(question, event, parts)
                        yield parts
        except httpx.TransportError as error:
            raise AskFailedError(f"{type(error).__name__} {error}", parts) from None
        if not ended:
            raise AskFailedError("the stream ended without [DONE]", parts)

    async def get(self, path: str) -> httpx.Response | None:
        """Return the reply of a GET route, or None if no server answers."""
        try:
            return await self._http.get(path, timeout=10.0)
        except httpx.TransportError:
            return None

    async def post(self, path: str) -> None:
        """Call a route without a body, such as ``/flush_cache``. Failures are ignored."""
        try:
            await self._http.post(path)
        except httpx.TransportError:
            return

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def check(
    asker: Asker,
    question: Question,
    expected: Mapping[int, AnswerPart],
    speculation: Mapping[str, Any],
    stream: bool,
    cancel_after: int | None,
) -> RequestVerdict:
    """Send a request and compare its answers with the expected ones.

    If the request was cancelled or has failed, its answers must be beginnings of the expected ones.

    Args:
        asker: Client that sends the request.
        question: The request.
        expected: The answers of an undisturbed run.
        speculation: The `speculation` object of the request.
        stream: True to request a stream.
        cancel_after: Number of events after which the client cancels a stream. None lets it end.
    """
    parts: Mapping[int, AnswerPart] = {}
    try:
        if not stream:
            parts = await asker.whole(question, speculation)
        else:
            number = 0
            async with aclosing(asker.pieces(question, speculation)) as pieces:
                async for parts in pieces:
                    number += 1
                    if number == cancel_after:
                        return _begun(expected, parts, RequestVerdict(RequestEnding.CANCELLED))
    except AskFailedError as error:
        ending = RequestEnding.FAILED if error.retry_after is None else RequestEnding.REFUSED
        return _begun(expected, error.parts, RequestVerdict(ending, str(error)))
    if dict(parts) != dict(expected):
        return RequestVerdict(RequestEnding.WRONG, f"{question.kind}: got {parts}, expected {expected}")
    return RequestVerdict(RequestEnding.RIGHT)


def _refusal(reply: httpx.Response, text: str) -> AskFailedError:
    overloaded = reply.status_code == httpx.codes.TOO_MANY_REQUESTS
    return AskFailedError(
        f"{reply.status_code}: {text[:QUOTED_CHARS]}",
        retry_after=reply.headers.get("Retry-After") if overloaded else None,
    )


def _begun(
    expected: Mapping[int, AnswerPart], parts: Mapping[int, AnswerPart], verdict: RequestVerdict
) -> RequestVerdict:
    """Return the verdict, or a wrong one if a part is not the beginning of what was expected."""
    for index, part in parts.items():
        if index not in expected or expected[index][: len(part)] != part:
            return RequestVerdict(
                RequestEnding.WRONG, f"got the beginning {part}, expected {expected.get(index)}"
            )
    return verdict


def _collect(question: Question, event: Mapping[str, Any], parts: dict[int, AnswerPart]) -> None:
    if question.path == GENERATE:
        parts[0] = tuple(event["output_ids"])  # each event repeats all tokens
        return
    for choice in event.get("choices") or ():
        text = _text(question, choice, "delta")
        index = choice.get("index", 0)
        parts[index] = str(parts.get(index, "")) + text


def _text(question: Question, choice: Mapping[str, Any], holder: str) -> str:
    if question.path == CHAT:
        return str((choice.get(holder) or {}).get("content") or "")
    return str(choice.get("text") or "")
