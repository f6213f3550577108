"""SGLang's routes for operation: ``/health_generate``, ``/abort_request`` and ``/flush_cache``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.core import Job
from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.generation import collect
from outrider.services.gateway.guards.parsed_body import ParsedBodyRoute
from outrider.services.gateway.parameters import NATIVE, Parameters
from outrider.services.gateway.routes.context import ERROR_RESPONSES, core_of, ignored_header
from outrider.services.gateway.schemas.native import AbortRequest
from outrider.services.gateway.sse import run_until_disconnect
from outrider.shared.base.errors import InvalidRequestError

HEALTH_TIMEOUT_S = 20.0
router = APIRouter(route_class=ParsedBodyRoute)


@router.get("/health_generate", responses=ERROR_RESPONSES)
async def health_generate(request: Request) -> Response:
    """Generate one token, and report success only if it arrives."""
    core = core_of(request)
    core.check_ready()

    async def prompts() -> Sequence[tuple[int, ...]]:
        return [(0,)]

    parameters = Parameters(max_tokens=1, temperature=0.0)
    job = Job(prompts, 1, parameters, NATIVE, HEALTH_TIMEOUT_S)
    await run_until_disconnect(request.receive, collect(core.generate(job), 1))
    return JsonResponse({"status": "ok"})


@router.post("/abort_request", responses=ERROR_RESPONSES)
async def abort_request(body: AbortRequest, request: Request) -> Response:
    """Abort the running requests with this `rid`, or all requests."""
    headers = ignored_header(body)
    if not body.rid and not body.abort_all:
        raise InvalidRequestError("Set rid, or abort_all: true.", field="rid")
    aborted = core_of(request).abort(None if body.abort_all else body.rid)
    return JsonResponse({"aborted": aborted}, headers=headers)


@router.get("/flush_cache", responses=ERROR_RESPONSES)
@router.post("/flush_cache", responses=ERROR_RESPONSES)
async def flush_cache(request: Request) -> Response:
    """Empty the prefix cache of every target that is ready. Running requests continue.

    Raises:
        OutriderError: A target has failed. All others have finished.
    """
    core = core_of(request)
    core.check_ready()
    clients = [one.client for one in core.targets.members if one.client.ready]
    flushes = (client.flush_prefixes() for client in clients)
    pages = 0
    for found in await asyncio.gather(*flushes, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found
        pages += found
    return JsonResponse({"success": True, "message": f"Removed {pages} pages from the prefix cache."})
