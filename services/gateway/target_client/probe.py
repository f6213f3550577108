"""Checks the target's health at intervals, because the connections of a process that hangs stay open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.shared.obs.logging import get_logger

PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 8.0
_log = get_logger("outrider.gateway.target")


async def probe_target(
    channel: grpc.aio.Channel, service: str, answers: Callable[[bool], None], timeout_s: float
) -> None:
    """Send health checks to one target until this task is cancelled.

    An overdue reply does not abort running sequences. A target that was only suspended continues them later.

    Args:
        channel: gRPC channel to the target.
        service: Full name of the target's gRPC service.
        answers: Called with False when a reply is overdue, and with True when replies arrive again.
        timeout_s: Seconds after which a reply is overdue.
    """
    stub = health_pb2_grpc.HealthStub(channel)
    overdue = False
    while True:
        await asyncio.sleep(min(PROBE_INTERVAL_S, timeout_s))
        try:
            await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            # Any other error also ends the session, and the session's own error handling follows.
            failed = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            failed = False
        if failed is not overdue:
            overdue = failed
            _log.warning("target does not answer" if failed else "target answers again")
            answers(not failed)
