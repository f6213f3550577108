"""Checks the health of running gRPC services (`ServingProbe`)."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.shared.rpc.client import open_channel

TARGET_SERVICE = "outrider.target.v1.Target"
DRAFT_SERVICE = "outrider.draft.v1.Draft"


class ServingProbe:
    """Checks the health of one gRPC service over a single channel.

    Args:
        address: gRPC address of the server.
        service: Full name of the gRPC service, or an empty string for the server as a whole.
    """

    def __init__(self, address: str, service: str = "") -> None:
        self._channel = open_channel(address)
        self._stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self._request = health_pb2.HealthCheckRequest(service=service)

    def __enter__(self) -> ServingProbe:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def status(self, timeout_s: float = 2.0) -> str:
        """Return SERVING, NOT_SERVING or UNKNOWN, or the name of the gRPC status code if the call failed."""
        try:
            reply = self._stub.Check(self._request, timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))

    def answers(self, timeout_s: float = 2.0) -> bool:
        """Return True if the server answers, whatever the status is."""
        return self.status(timeout_s) in ("SERVING", "NOT_SERVING", "SERVICE_UNKNOWN", "UNKNOWN", "NOT_FOUND")

    def serving(self, timeout_s: float = 2.0) -> bool:
        """Return True if the service accepts requests."""
        return self.status(timeout_s) == "SERVING"
