"""Helpers for tests of the REST API: calls, and checks of error replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import openai
from gateway_thread import GatewayThread, Stack

TIMEOUT_S = 30
CHAT = "/v1/chat/completions"
MakeGateway = Callable[..., GatewayThread]


def client_of(gateway: GatewayThread, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=gateway.stack.base_url, timeout=TIMEOUT_S, **options)


def openai_client(stack: Stack, timeout_s: float = TIMEOUT_S) -> openai.OpenAI:
    """Return an `openai` client, which does not retry."""
    return openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=timeout_s)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
