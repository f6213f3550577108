"""``/health``, ``/ping`` (liveness), ``/ready`` (readiness), ``/metrics``, ``/status.json``, ``/version``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.services.gateway.errors import JsonResponse
from outrider.services.gateway.routes.context import ERROR_RESPONSES, core_of
from outrider.services.gateway.status import status_object
from outrider.shared.base.version import installed_version
from outrider.shared.obs.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/health")
async def health() -> Response:
    """Report that the process is alive, without waiting for any other service."""
    return JsonResponse({"status": "ok"})


@router.get("/ready", responses={503: ERROR_RESPONSES[503]})
async def ready(request: Request) -> Response:
    """Report whether a request sent now would be accepted."""
    core_of(request).check_ready()
    return JsonResponse({"status": "ready"})


@router.get("/ping")
@router.post("/ping")
async def ping() -> Response:
    """Report that the process is alive. SageMaker calls this route, as it does with vLLM."""
    return JsonResponse({})


@router.get("/version")
async def show_version() -> Response:
    """Return the version of Outrider."""
    return JsonResponse({"version": installed_version()})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics of the gateway, followed by those of the target, as Prometheus text."""
    return Response(await core_of(request).render_metrics(), media_type=CONTENT_TYPE)


@router.get("/status.json", responses=ERROR_RESPONSES)
async def status(request: Request) -> Response:
    """Return the status of all services, the values of all metrics, and the latest errors."""
    return JsonResponse(await status_object(core_of(request)))
