"""`RestLoad`: the client with which the load calls an OpenAI-compatible endpoint of any server."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

from outrider.bench.load.open_loop import Experience, LoadClient, LoadRequest
from outrider.shared.base.errors import UnavailableError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class RestLoad(LoadClient):
    """Sends requests over REST.

    Args:
        url: Address of the server.
        model: Name of the model on the server.
        api_key: API key to send, or None.
    """

    def __init__(self, url: str, model: str, api_key: str | None) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=600.0, limits=limits, trust_env=False
        )
        self._model = model

    async def ask(self, request: LoadRequest, experience: Experience) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "messages" if request.is_chat else "prompt": list(request.prompt)
            if not isinstance(request.prompt, str)
            else request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.speculation:
            body["speculation"] = request.speculation
        async with self._http.stream("POST", CHAT if request.is_chat else COMPLETIONS, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise UnavailableError(
                    f"{response.status_code}: {(await response.aread())[:200].decode(errors='replace')}"
                )
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _note(json.loads(line[len("data: ") :]), experience)

    async def close(self) -> None:
        await self._http.aclose()


def _note(event: dict[str, Any], experience: Experience) -> None:
    if "error" in event:
        raise UnavailableError(str(event["error"].get("message")))
    if usage := event.get("usage"):
        experience.tokens = int(usage["completion_tokens"])
    for choice in event.get("choices") or ():
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            experience.chunks.append(time.perf_counter())
    for holder in (event, *(event.get("choices") or ())):
        if speculation := holder.get("speculation"):
            experience.accept_length = float(speculation.get("accept_length") or experience.accept_length)
            experience.draft_tokens = int(speculation.get("draft_tokens") or experience.draft_tokens)
