"""Helpers for tests of the REST API: calls, and checks of error replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from gateway_thread import GatewayThread

TIMEOUT_S = 30
CHAT = "/v1/chat/completions"
MakeGateway = Callable[..., GatewayThread]


def client_of(gateway: GatewayThread, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=gateway.stack.base_url, timeout=TIMEOUT_S, **options)


def error_of(response: httpx.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
