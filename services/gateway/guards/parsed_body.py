"""Passes the parsed body of a request to its route, so that large bodies are parsed only once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope

PARSED_BODY = "parsed_body"


def keep_parsed(scope: Scope, parsed: Any) -> None:
    """Keep the body that `BodyGuard` has parsed, for the route."""
    scope.setdefault("state", {})[PARSED_BODY] = parsed


class ParsedBodyRoute(APIRoute):
    """A route that reads its body from `keep_parsed` and does not parse the body again."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the framework's handler. The request passed to it contains the parsed body."""
        handle = super().get_route_handler()

        async def with_parsed_body(request: Request) -> Response:
            state = request.scope.get("state", {})
            if PARSED_BODY in state:
                # The framework reuses the parsed JSON that it finds in this attribute.
                request._json = state.pop(PARSED_BODY)
            return await handle(request)

        return with_parsed_body
