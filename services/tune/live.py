"""Answers prompts concurrently through the REST API of a running server, and measures the speed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.services.clients.server_trust import server_trust
from outrider.services.tune.candidates import AutoLimits
from outrider.shared.base.errors import OutriderError, UnavailableError
from outrider.shared.spec.tree import DraftShape

TIMEOUT_S = 300.0


@dataclass
class LiveAnswer:
    """One answer of the server, with the trace of its rounds.

    Attributes:
        prompt_len: Number of tokens of the prompt.
        token_ids: Tokens of the answer.
        rounds: The traced rounds, in order. Empty if no trace was requested.
        first_s, last_s: Client's times of the first and last event with tokens, from `time.perf_counter`.
    """

    prompt_len: int
    token_ids: list[int] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def round_ms(self) -> float | None:
        """Mean duration of the rounds after the first round. None if there are fewer than three rounds."""
        if len(self.rounds) < 3:
            return None
        return (self.last_s - self.first_s) * 1e3 / (len(self.rounds) - 1)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The answers of one run, and its duration in seconds."""

    answers: Sequence[LiveAnswer]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Answered tokens of all streams per second."""
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds


class LiveClient:
    """Sends token ids to ``/v1/completions`` of a server.

    Args:
        url: REST address of the server.
        model: Name of the model.
        api_key: API key to send, if any.
        on_run: Called after each run.

    Raises:
        UnavailableError: The server cannot be reached, or the connection breaks.
        OutriderError: The server refuses a request. The exception has the server's message.
    """

    def __init__(
        self, url: str, model: str, api_key: str | None = None, on_run: Callable[[], None] = lambda: None
    ) -> None:
        self._url = url
        self._model = model
        self._on_run = on_run
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A new context for each run would take longer than a short answer.
        self._tls = server_trust(url)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        shape: DraftShape,
        *,
        streams: int,
        tokens: int,
        trace: bool = False,
    ) -> LiveRun:
        """Answer prompts greedily, with `streams` requests in flight until no prompt is left.

        Args:
            prompts: Prompts as token ids.
            shape: Shape of the draft trees. `NO_DRAFT` switches speculation off. `AutoLimits` selects mode
                `auto` within these limits.
            streams: Number of concurrent requests.
            tokens: Largest length of each answer, in tokens.
            trace: True to request the trace of each round.
        """
        done = asyncio.run(self._run(list(prompts), shape, streams, tokens, trace))
        self._on_run()
        return done

    async def _run(
        self, prompts: list[Sequence[int]], shape: DraftShape, streams: int, tokens: int, trace: bool
    ) -> LiveRun:
        answers = [LiveAnswer(len(prompt)) for prompt in prompts]
        queue = iter(range(len(prompts)))
        limits = httpx.Limits(max_connections=streams)
        async with httpx.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            timeout=TIMEOUT_S,
            limits=limits,
            trust_env=False,
            verify=self._tls,
        ) as http:

            async def worker() -> None:
                for number in queue:
                    body = self._body(prompts[number], shape, tokens, trace)
                    await self._answer(http, body, answers[number])

            started = time.perf_counter()
            await asyncio.gather(*(worker() for _ in range(min(streams, len(prompts)))))
            return LiveRun(answers, time.perf_counter() - started)

    def _body(self, prompt: Sequence[int], shape: DraftShape, tokens: int, trace: bool) -> dict[str, Any]:
        speculation: dict[str, Any] = {"mode": "off", "trace": trace}
        if shape.drafts:
            sizes = {"depth": shape.depth, "topk": shape.topk, "max_nodes": shape.max_nodes}
            speculation |= {"mode": "auto" if isinstance(shape, AutoLimits) else "on", **sizes}
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "speculation": speculation,
        }

    async def _answer(self, http: httpx.AsyncClient, body: dict[str, Any], answer: LiveAnswer) -> None:
        try:
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _take(json.loads(line[len("data: ") :]), answer)
        except httpx.TransportError as error:
            raise UnavailableError(f"The connection to {self._url} broke: {error}.", field="url") from None


def _take(event: dict[str, Any], answer: LiveAnswer) -> None:
    if error := event.get("error"):
        raise OutriderError(str(error.get("message")))
    if not event.get("choices"):
        return
    choice = event["choices"][0]
    if ids := choice.get("token_ids"):
        answer.last_s = time.perf_counter()
        if not answer.token_ids:
            answer.first_s = answer.last_s
        answer.token_ids += ids
    answer.rounds += (event.get("speculation") or {}).get("trace") or []


def _refusal(status: int, raw: bytes) -> OutriderError:
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"The server answered {status}."
    return OutriderError(str(message))
