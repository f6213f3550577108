"""``GET /`` (playground), ``GET /status`` (operator's page) and their files. The pages need no API key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.playground.pages import HEADERS, StaticFile


def playground_router(
    files: Mapping[str, StaticFile], guarded: Mapping[str, StaticFile], needs_key: Callable[[], bool]
) -> APIRouter:
    """Return the routes of all static files of the playground.

    The paths of the files are fixed. A path that a client sends is never used to read a file.

    Args:
        files, guarded: The files by path, for requests that need no API key and for those that need one.
        needs_key: Returns whether requests need a key. The keys can change while the gateway runs.
    """
    router = APIRouter(include_in_schema=False)
    for path, file in files.items():
        send = _sender(file, guarded[path], needs_key)
        router.add_api_route(path, send, methods=["GET", "HEAD"], response_class=Response)
    return router


def _sender(
    usual: StaticFile, guarded: StaticFile, needs_key: Callable[[], bool]
) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        file = guarded if needs_key() else usual
        headers = {**HEADERS, "ETag": file.etag}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return send
