"""Adds HEAD to every route that has GET, and OPTIONS to every route."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
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
    """Answer OPTIONS on every path with the list of methods that the path supports.

    Args:
        app: The application. Its own routes, such as ``/docs``, get OPTIONS too.
        routers: The routers of the application.
    """
    methods: dict[str, set[str]] = {}
    own = [route for route in app.routes if not isinstance(route, APIRoute)]
    for route in [*own, *(route for router in routers for route in router.routes)]:
        if isinstance(route, Route):
            methods.setdefault(route.path, {"OPTIONS"}).update(route.methods or ())
    for path, allowed in methods.items():
        names = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))

        async def options(_request: Request, names: str = names) -> Response:
            return Response(status_code=204, headers={"Allow": names})

        app.add_route(path, options, methods=["OPTIONS"], include_in_schema=False)
