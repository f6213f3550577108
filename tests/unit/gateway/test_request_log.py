"""The level at which the gateway logs a request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.services.gateway import middleware
from outrider.services.gateway.metrics import GatewayMetrics
from outrider.services.gateway.middleware import RequestContext
from outrider.services.gateway.recent_errors import RecentErrors


def logged(monkeypatch: pytest.MonkeyPatch, method: str, route: str | None, status: int) -> str:
    """Return the level of the line about a request. A request without a route has an unknown path."""

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if route is not None:
            scope["route"] = SimpleNamespace(path=route)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    levels: list[str] = []
    for level in ("debug", "info"):
        monkeypatch.setattr(
            middleware._log, level, lambda _event, level=level, **_fields: levels.append(level), raising=False
        )

    async def nothing(*_: Any) -> Any:
        return None

    context = RequestContext(app, GatewayMetrics(), RecentErrors())
    scope = {"type": "http", "method": method, "path": route or "/x", "headers": [], "state": {}}
    asyncio.run(context(scope, nothing, nothing))
    (level,) = levels
    return level


@pytest.mark.parametrize(
    ("method", "route", "status", "level"),
    [
        ("POST", "/v1/chat/completions", 200, "info"),
        ("GET", "/v1/models", 200, "info"),
        ("GET", "/", 200, "debug"),
        ("GET", "/status", 304, "debug"),
        ("HEAD", "/playground/main.js", 200, "debug"),
        ("GET", "/metrics", 200, "debug"),
        ("GET", None, 404, "debug"),  # such as /favicon.ico
        ("POST", None, 404, "info"),
        ("GET", None, 401, "info"),
    ],
)
def test_requests_of_browsers_and_probes_are_logged_for_debugging_only(
    method: str, route: str | None, status: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert logged(monkeypatch, method, route, status) == level
