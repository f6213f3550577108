"""The client of `outrider bench mixed`: sends one kind of request in the format of either API."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from http.client import HTTPException
from typing import Any, Protocol, TypeVar

import httpx

from outrider.bench.load.lone import LoneConnection
from outrider.bench.load.server import QUOTED_CHARS, Server, key_headers, refusal
from outrider.bench.mixed.cases import RequestKind
from outrider.services.clients.server_trust import server_trust
from outrider.shared.base.errors import UnavailableError

TIMEOUT_S = 600.0
LENGTHS = "--prompt-tokens, --new-tokens, --longest, --ttft or --auto-tokens"
FIRST_ID = 10
"""Lowest token id of the random prompts. Lower ids are often special tokens."""
NO_CHOICES = re.compile(r'"choices": ?\[\]')
JSON_TYPE = {"content-type": "application/json"}

T = TypeVar("T")


class RequestFormat(Enum):
    """Format of the requests."""

    OUTRIDER = "outrider"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer that did not stream: seconds from sending the request, and number of tokens."""

    seconds: float
    tokens: int


class Format(Protocol):
    """Format of requests and answers of one API."""

    path: str

    def body(
        self, prompt: list[int], new: int, kind: RequestKind, ignore_eos: bool, stream: bool
    ) -> dict[str, Any]:
        """Return the request."""
        ...

    def without(self, body: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
        """Return the request without these fields."""
        ...

    def tokens(self, answer: dict[str, Any]) -> int | None:
        """Return the number of tokens that an answer or an event reports, or None if it reports none."""
        ...


class NativeFormat:
    """``/generate`` of an Outrider server. Prompts are token ids."""

    path = "/generate"

    def body(
        self, prompt: list[int], new: int, kind: RequestKind, ignore_eos: bool, stream: bool
    ) -> dict[str, Any]:
        sampling: dict[str, Any] = {**kind.sampling, "max_new_tokens": new, "ignore_eos": ignore_eos}
        if kind.schema is not None:
            sampling["json_schema"] = kind.schema
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "speculation": dict(kind.speculation),
            "stream": stream,
        }
        logprobs = {"return_logprob": True, "top_logprobs_num": kind.logprobs}
        return body | (logprobs if kind.logprobs else {})

    def without(self, body: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
        return {**body, "sampling_params": _without(body["sampling_params"], omitted)}

    def tokens(self, answer: dict[str, Any]) -> int | None:
        return (answer.get("meta_info") or {}).get("completion_tokens")


class OpenAIFormat:
    """``/v1/completions`` of any server. Prompts are token ids, and there is no `speculation` object."""

    path = "/v1/completions"

    def __init__(self, model: str) -> None:
        self._model = model

    def body(
        self, prompt: list[int], new: int, kind: RequestKind, ignore_eos: bool, stream: bool
    ) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": new, **kind.sampling}
        body |= {"ignore_eos": ignore_eos, "stream": stream}
        if kind.schema is not None:
            named = {"name": "bench", "schema": kind.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        if kind.logprobs:
            body["logprobs"] = kind.logprobs
        return body | ({"stream_options": {"include_usage": True}} if stream else {})

    def without(self, body: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
        return _without(body, omitted)

    def tokens(self, answer: dict[str, Any]) -> int | None:
        return (answer.get("usage") or {}).get("completion_tokens")


class AnswerStream:
    """An answer that arrives in pieces."""

    def __init__(self, response: httpx.Response, form: Format) -> None:
        self._response = response
        self._form = form
        self._last = ""
        self.pieces = 0

    async def arrivals(self) -> AsyncGenerator[float, None]:
        """Yield the arrival time of each piece of a streamed answer, from `time.perf_counter`.

        Close the generator if it is not read to its end.

        Raises:
            UnavailableError: The server reports an error in the stream.
        """
        async with aclosing(self._response.aiter_lines()) as lines:  # type: ignore[type-var]
            async for line in lines:
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                now = time.perf_counter()
                if data.startswith('{"error"'):
                    raise UnavailableError(data[:QUOTED_CHARS])
                self._last = data
                if not NO_CHOICES.search(data):  # the event with the usage has no choice
                    self.pieces += 1
                    yield now

    @property
    def tokens(self) -> int:
        """Number of tokens so far. Pieces are counted if the server has not reported its count yet."""
        # Parse only the last event, because each event of /generate repeats all earlier tokens.
        counted = self._form.tokens(json.loads(self._last)) if self._last else None
        return self.pieces if counted is None else counted


class LoneClient:
    """Sends one request at a time over one connection and blocks until its answer is complete.

    Args:
        url: Address of the server, without a trailing slash.
        form: Format of the requests.
        headers: Headers of every request.
    """

    def __init__(self, url: str, form: Format, headers: Mapping[str, str]) -> None:
        self._connection = LoneConnection(url, headers, TIMEOUT_S)
        self._form = form

    def send(self, body: bytes) -> WholeAnswer:
        """Send a request and return the answer.

        Raises:
            ConfigurationError: The server refuses the request. The message names the option to change.
            UnavailableError: The server fails.
        """
        try:
            reply = self._connection.post(self._form.path, body)
        except (OSError, HTTPException) as error:
            raise _broken(error) from None
        if reply.status != httpx.codes.OK:
            raise _refusal(reply.status, reply.body.decode(errors="replace"), body)
        return WholeAnswer(reply.seconds, self._form.tokens(json.loads(reply.body)) or 0)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class MixedClient:
    """HTTP client that sends requests with random prompts.

    Create the client inside the running event loop, and close it.

    Args:
        server: The server.
        api: Format of the requests.
        vocab: All token ids of the prompts are below this number.
        omitted: Fields to leave out of every request.
        api_key: API key to send, or None.
        seed: Seed of the prompts.
    """

    def __init__(
        self,
        server: Server,
        api: RequestFormat,
        vocab: int,
        omitted: Collection[str],
        api_key: str | None,
        seed: int,
    ) -> None:
        self._form: Format = NativeFormat() if api is RequestFormat.OUTRIDER else OpenAIFormat(server.model)
        self._draw = random.Random(seed)
        self._vocab = vocab
        self._omitted = omitted
        self._url, self._headers = server.url, key_headers(api_key)
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            timeout=TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            verify=server_trust(self._url),
        )

    def body(
        self, length: int, new: int, kind: RequestKind, *, ignore_eos: bool = True, stream: bool = False
    ) -> bytes:
        """Return an encoded request with a new random prompt.

        Args:
            length: Number of tokens of the prompt.
            new: Number of tokens of the answer. If `ignore_eos` is False, the answer may be shorter.
            kind: Kind of the request.
            ignore_eos: True if the answer continues after an end-of-text token.
            stream: True to request the answer in pieces.
        """
        prompt = [self._draw.randrange(FIRST_ID, self._vocab) for _ in range(length)]
        body = self._form.body(prompt, new, kind, ignore_eos, stream)
        return json.dumps(self._form.without(body, self._omitted)).encode()

    async def send(self, body: bytes) -> WholeAnswer:
        """Send a request and return the answer.

        Raises:
            ConfigurationError: The server refuses the request. The message names the option to change.
            UnavailableError: The server fails.
        """
        started = time.perf_counter()
        try:
            response = await self._http.post(self._form.path, content=body, headers=JSON_TYPE)
        except httpx.TransportError as error:
            raise _broken(error) from None
        seconds = time.perf_counter() - started
        if response.status_code != httpx.codes.OK:
            raise _refusal(response.status_code, response.text, body)
        return WholeAnswer(seconds, self._form.tokens(response.json()) or 0)

    @contextmanager
    def alone(self) -> Iterator[LoneClient]:
        """Yield a client for requests that are sent while no other request runs."""
        client = LoneClient(self._url, self._form, self._headers)
        try:
            yield client
        finally:
            client.close()

    @asynccontextmanager
    async def stream(self, body: bytes) -> AsyncIterator[AnswerStream]:
        """Send a request and yield the stream of its answer. Leaving the block early cancels the request.

        Raises:
            ConfigurationError: The server refuses the request. The message names the option to change.
            UnavailableError: The server fails.
        """
        try:
            async with self._http.stream(
                "POST", self._form.path, content=body, headers=JSON_TYPE
            ) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    raise _refusal(response.status_code, text, body)
                yield AnswerStream(response, self._form)
        except httpx.TransportError as error:
            raise _broken(error) from None

    async def metrics(self) -> str:
        """Return the text of ``/metrics``. It is empty if the server has no such route."""
        try:
            response = await self._http.get("/metrics")
        except httpx.TransportError:
            return ""
        return response.text if response.status_code == httpx.codes.OK else ""

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time and return their results. If one raises, the others are cancelled."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _without(body: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in omitted}


def _refusal(status: int, text: str, body: bytes) -> Exception:
    sent = json.loads(body)
    return refusal(status, text, [*sent, *sent.get("sampling_params", ())], LENGTHS, "--api")


def _broken(error: Exception) -> UnavailableError:
    return UnavailableError(f"The connection broke: {type(error).__name__} {error}", field="--url")
