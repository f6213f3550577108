"""Adds HEAD to every route that has GET, and OPTIONS to every route."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """Innermost middleware: answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        # The outer middleware reads the same scope, and it logs the client's own method.
        scope["method"] = "GET"
        try:
            await self._app(scope, receive, without_body)
        finally:
            scope["method"] = "HEAD"


def add_options(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Answer OPTIONS on every path of `routers` with the list of methods that the path supports."""
    methods: dict[str, set[str]] = {}
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute):
            methods.setdefault(route.path, {"OPTIONS"}).update(route.methods or ())
    for path, allowed in methods.items():
        names = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))

        async def options(_request: Request, names: str = names) -> Response:
            return Response(status_code=204, headers={"Allow": names})

        app.add_route(path, options, methods=["OPTIONS"], include_in_schema=False)
