"""`RestLoad`: the client with which the load calls an OpenAI-compatible endpoint of any server."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

import httpx

from outrider.bench.load.open_loop import Experience, LoadClient, LoadRequest
from outrider.bench.load.server import Server, key_headers, refusal
from outrider.services.clients.server_trust import server_trust
from outrider.shared.base.errors import UnavailableError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LENGTHS = "--prompt-tokens or --max-tokens"
TIMEOUT_S = 600.0
UNSENT: tuple[dict[str, Any], ...] = ({}, {"mode": "auto"})
"""Speculation objects that can be left out without a change. Other servers do not have the field."""


class Route(Enum):
    """Route for prompts that are text or messages. Token ids always go to `COMPLETIONS`."""

    CHAT = "chat"
    COMPLETIONS = "completions"


class RestLoad(LoadClient):
    """REST client that sends requests to one server.

    Args:
        server: The server and its model.
        api_key: API key to send, or None.
        omitted: Fields to leave out of every request, because the server refuses them.
    """

    def __init__(self, server: Server, api_key: str | None, omitted: Sequence[str] = ()) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=server.url,
            headers=key_headers(api_key),
            timeout=TIMEOUT_S,
            limits=limits,
            trust_env=False,
            verify=server_trust(server.url),
        )
        self._model = server.model
        self._omitted = omitted

    async def ask(self, request: LoadRequest, experience: Experience) -> None:
        """Send a request, and record the stream of its answer in `experience`.

        Raises:
            ConfigurationError: The server refuses the request. The message names the option to change.
            UnavailableError: The server fails.
        """
        body = self._body(request)
        async with self._http.stream("POST", CHAT if request.is_chat else COMPLETIONS, json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                experience.status = response.status_code
                retry_after = response.headers.get("retry-after", "")
                experience.retry_after_s = float(retry_after) if retry_after.isdecimal() else None
                raise refusal(response.status_code, text, body, LENGTHS, "--route")
            async for line in response.aiter_lines():
                if line.startswith("data:") and (data := line.removeprefix("data:").strip()) != "[DONE]":
                    _note(json.loads(data), experience)
        if experience.tokens and not experience.chunks:  # the only piece ended the stream
            experience.chunks.append(time.perf_counter())
        # Some servers report no usage. Each piece then counts as one token.
        experience.tokens = experience.tokens or len(experience.chunks)

    async def close(self) -> None:
        await self._http.aclose()

    def _body(self, request: LoadRequest) -> dict[str, Any]:
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        body: dict[str, Any] = {
            "model": self._model,
            "messages" if request.is_chat else "prompt": prompt,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            **request.sampling,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.speculation not in UNSENT:
            body["speculation"] = request.speculation
        return {name: value for name, value in body.items() if name not in self._omitted}


def _note(event: dict[str, Any], experience: Experience) -> None:
    """Record one event of the stream, which arrived now."""
    if error := event.get("error"):
        raise UnavailableError(str(error.get("message") if isinstance(error, dict) else error))
    if usage := event.get("usage"):
        experience.tokens = int(usage["completion_tokens"])
    for choice in event.get("choices") or ():
        if _has_tokens(choice):
            experience.chunks.append(time.perf_counter())
    for holder in (event, *(event.get("choices") or ())):
        if speculation := holder.get("speculation"):
            experience.accept_length = float(speculation.get("accept_length") or experience.accept_length)
            experience.draft_tokens = int(speculation.get("draft_tokens") or experience.draft_tokens)


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Return whether an entry of `choices` in a streamed event contains a piece of the answer.

    A token has no text if its bytes are incomplete, if it is a special token, or if the server has no
    tokenizer. In a text completion, an event without text therefore counts, unless it only ends the stream.
    In a chat, an event without content only opens the answer and does not count.
    """
    if choice.get("text") or choice.get("token_ids"):
        return True
    if "delta" in choice:
        delta = choice["delta"] or {}
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    return "text" in choice and choice.get("finish_reason") is None
