"""REST client of the gateway: streams chat and text completions, and measures their speed.

Any client for OpenAI's API can be used instead. This client also returns the `speculation` object.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx

from outrider.services.clients.received import ReceivedTrace
from outrider.services.clients.server_trust import server_trust, tls_failure
from outrider.shared.base.errors import ErrorCode, OutriderError, UnavailableError

DEFAULT_URL = "http://127.0.0.1:8000"
SHORTEST_STREAM_S = 0.02
"""Text that arrives within this time is one delivery, whose speed says nothing."""


def gateway_url(given: str) -> str:
    """Return the URL of a gateway. The given text may omit ``http://`` and may end with ``/v1`` or a slash.

    Example:
        >>> gateway_url("localhost:8000/v1/")
        'http://localhost:8000'
    """
    url = given.strip() if "://" in given else f"http://{given.strip()}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(slots=True)
class StreamedReply:
    """Result of one streamed request.

    Attributes:
        text: The complete text.
        token_ids: Token ids of the text if the request set ``return_token_ids``, else empty.
        finish_reason: Why the answer ended, such as ``stop`` or ``length``. None until the answer ends.
        prompt_tokens, completion_tokens: Token counts as reported by the server. If the answer was cut off,
            `completion_tokens` counts the received tokens, and `prompt_tokens` is 0.
        speculation: The server's `speculation` object. If the answer was cut off, its numbers are those of
            the received rounds.
        seed: Seed that the server used, if it reported one.
        first_token_s, last_token_s, total_s: Seconds from the request to the first text, to the last text and
            to the end, respectively.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second over the whole request, including the prefill."""
        return self.completion_tokens / self.total_s if self.total_s else 0.0

    @property
    def stream_speed(self) -> float | None:
        """Tokens after the first one per second after the first text, as the playground defines tokens/s.

        None if there is no such token, or if the text came almost at once. The time then says nothing about
        the speed.
        """
        seconds = self.last_token_s - self.first_token_s
        if self.completion_tokens < 2 or seconds < SHORTEST_STREAM_S:
            return None
        return (self.completion_tokens - 1) / seconds


class RestClient:
    """REST client of one gateway. The `stream_*` methods yield pieces of text and fill a `StreamedReply`.

    Args:
        url: URL of the gateway, in any format that `gateway_url` accepts.
        api_key: API key to send. None sends no key.
        timeout_s: Time limit of each network read and write, in seconds.
        verify: True to require a certificate that `server_trust` accepts from an https URL. An SSL context
            defines its own check, and may contain a client certificate. False accepts any certificate.

    Raises:
        UnavailableError: No server answers at the URL, its certificate is not accepted, or the connection
            breaks.
        OutriderError: The server reports an error. The exception has the server's message and status.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        verify: bool | ssl.SSLContext = True,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = gateway_url(url)
        # Ignore proxies from the environment. They are meant for outside addresses, not for the gateway.
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            trust_env=False,
            verify=server_trust(self.url) if verify is True else verify,
        )

    def __enter__(self) -> RestClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def status(self, path: str) -> tuple[int, dict[str, Any]]:
        """Request a status route like `answer`, but return the status 0 if TLS fails, too."""
        try:
            return self.answer(path)
        except UnavailableError:
            return 0, {}

    def answer(self, path: str) -> tuple[int, dict[str, Any]]:
        """Request a status route.

        Returns:
            (HTTP status, JSON body or an empty dict). The status is 0 if no server answers.

        Raises:
            UnavailableError: TLS failed, for example because the server's certificate is not accepted.
        """
        try:
            response = self._http.get(path, timeout=5.0)
        except httpx.TransportError as error:
            if (refusal := tls_failure(error, self.url)) is not None:
                raise refusal from None
            return 0, {}
        try:
            body = response.json()
        except ValueError:
            body = {}
        return response.status_code, body if isinstance(body, dict) else {}

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object of a GET route.

        Raises:
            UnavailableError: No server answers, or its certificate is not accepted.
            OutriderError: The server reports an error.
        """
        status, body = self.answer(path)
        if status != httpx.codes.OK:
            raise self._unreachable() if status == 0 else _error(status, body)
        return body

    @cached_property
    def model(self) -> str:
        """Name of the first served model. The client requests the name only once."""
        body = self.get_json("/v1/models")
        if not body.get("data"):
            raise _error(httpx.codes.OK, body)
        return str(body["data"][0]["id"])

    def count_tokens(self, prompt: str | list[dict[str, str]]) -> tuple[int, int]:
        """Return the number of tokens of a text or of messages, and the length of the context in tokens.

        Raises:
            UnavailableError: No server answers.
            OutriderError: The server reports an error, for example because it has no such route.
        """
        try:
            kind = "prompt" if isinstance(prompt, str) else "messages"
            response = self._http.post("/tokenize", json={"model": self.model, kind: prompt})
        except httpx.TransportError as error:
            raise tls_failure(error, self.url) or self._unreachable() from None
        body = _json_object(response.content)
        count, context = body.get("count"), body.get("max_model_len")
        if not isinstance(count, int) or not isinstance(context, int):
            raise _error(response.status_code, body)
        return count, context

    def stream_chat(
        self, messages: list[dict[str, str]], options: Mapping[str, Any], reply: StreamedReply
    ) -> Iterator[str]:
        """Stream one chat completion."""
        for piece, _ in self.stream_chat_events(messages, options, reply):
            if piece:
                yield piece

    def stream_chat_events(
        self, messages: list[dict[str, str]], options: Mapping[str, Any], reply: StreamedReply
    ) -> Generator[tuple[str, dict[str, Any] | None], None, None]:
        """Stream one chat completion as (text, traced round or None). Closing the generator cancels it."""
        yield from self._stream(
            "/v1/chat/completions",
            # The reply's text contains the reasoning, as the model wrote it.
            {"messages": messages, "separate_reasoning": False, **options},
            reply,
            lambda choice: choice["delta"].get("content"),
        )

    def stream_completion(
        self, prompt: str | list[int], options: Mapping[str, Any], reply: StreamedReply
    ) -> Iterator[str]:
        """Stream one text completion. The prompt is text or token ids."""
        events = self._stream(
            "/v1/completions", {"prompt": prompt, **options}, reply, lambda choice: choice.get("text")
        )
        for piece, _ in events:
            if piece:
                yield piece

    def _stream(
        self, path: str, body: dict[str, Any], reply: StreamedReply, text_of: Any
    ) -> Generator[tuple[str, dict[str, Any] | None], None, None]:
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        started = time.perf_counter()
        received = ReceivedTrace()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _error(response.status_code, _json_object(response.read()))
                for event in _events(response):
                    if "error" in event:
                        raise _error(int(event["error"].get("status", 500)), event)
                    trace = (event.get("speculation") or {}).get("trace")
                    piece = _take(event, reply, text_of)
                    if piece:
                        reply.last_token_s = time.perf_counter() - started
                        reply.first_token_s = reply.first_token_s or reply.last_token_s
                    if piece or trace:
                        reply.text += piece or ""
                        received.add(trace[0] if trace else None)
                        yield piece or "", trace[0] if trace else None
        except httpx.ConnectError as error:
            raise tls_failure(error, self.url) or self._unreachable() from None
        except httpx.TransportError as error:
            raise UnavailableError(f"The connection to {self.url} broke: {error}.", field="url") from None
        finally:
            reply.total_s = time.perf_counter() - started
            if not reply.completion_tokens:
                # The answer was cut off before its end, which contains the server's own counts.
                reply.completion_tokens = len(reply.token_ids) or received.tokens
                reply.speculation |= received.as_speculation()

    def _unreachable(self) -> UnavailableError:
        return UnavailableError(
            f"No server answers at {self.url}. Start the services with `outrider up`, or pass another --url.",
            field="url",
        )


def _take(event: dict[str, Any], reply: StreamedReply, text_of: Any) -> str | None:
    """Merge one event into the reply, and return its text or None."""
    if usage := event.get("usage"):
        reply.prompt_tokens, reply.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if speculation := event.get("speculation"):
        reply.speculation |= speculation
    if (seed := (event.get("metadata") or {}).get("seed")) is not None:
        reply.seed = int(seed)
    if not event.get("choices"):
        return None
    choice = event["choices"][0]
    reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    if speculation := choice.get("speculation"):
        reply.speculation |= speculation
    reply.token_ids += choice.get("token_ids") or []
    text = text_of(choice)
    return str(text) if text else None


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _error(status: int, body: Mapping[str, Any]) -> OutriderError:
    details = body.get("error") or {}
    message = str(details.get("message") or f"The gateway answered {status}.")
    known = {code.value: code for code in ErrorCode}
    return OutriderError(
        message,
        code=known.get(status, ErrorCode.INTERNAL),
        reason=str(details.get("code") or "http_error"),
        field=details.get("param"),
    )
