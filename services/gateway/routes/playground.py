"""``GET /`` (playground), ``GET /status`` (operator's page) and their files. The pages need no API key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.playground.pages import HEADERS, StaticFile


def playground_router(files: Mapping[str, StaticFile]) -> APIRouter:
    """Return the routes of all static files of the playground.

    The paths of the files are fixed. A path that a client sends is never used to read a file.
    """
    router = APIRouter(include_in_schema=False)
    for path, file in files.items():
        router.add_api_route(path, _sender(file), methods=["GET", "HEAD"], response_class=Response)
    return router


def _sender(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "ETag": file.etag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return send
