"""gRPC servers with everything that a service owes its callers: error mapping, limits, keepalive, health v1 and reflection.

A server starts NOT_SERVING; `set_serving(True)` is the service's own decision (after warm-up).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.rpc.address import check_address
from outrider.shared.rpc.interceptors import AioErrorInterceptor, ErrorInterceptor
from outrider.shared.rpc.options import INTERNAL_MESSAGE_LIMIT, server_options

Servicers = Sequence[tuple[Callable[[Any, Any], None], object]]
"""Pairs of the generated ``add_XServicer_to_server`` and the servicer."""

# Watch calls of health checks are served apart, so that watchers never use up the workers.
HEALTH_WORKERS = 4
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class PatientHealth(health.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Health checks whose watchers may leave at any time.

    The library takes its lock to forget a watcher, in the thread that also completes sends, and holds the same lock while it waits for a
    status to be sent. A watcher that left in that moment would stop the whole server; so watchers are forgotten by the health workers.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=HEALTH_WORKERS, thread_name_prefix="health")
        super().__init__(experimental_non_blocking=True, experimental_thread_pool=self._pool)

    def Watch(self, request: Any, context: Any, send_response_callback: Any = None) -> Any:
        """See `health.HealthServicer.Watch`."""
        return super().Watch(request, _CallsBackElsewhere(context, self._pool), send_response_callback)


class _CallsBackElsewhere:
    """What `Watch` uses of a call's context."""

    def __init__(self, context: Any, pool: ThreadPoolExecutor) -> None:
        self._context = context
        self._pool = pool

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """See `grpc.RpcContext.add_callback`."""
        return bool(self._context.add_callback(lambda: self._pool.submit(callback)))


class SyncServer:
    """A `grpc.server` on one address. Use `start`, `set_serving`, `stop`; `port` is the bound TCP port (0 for a unix socket)."""

    def __init__(
        self,
        server: grpc.Server,
        health_servicer: health.HealthServicer,
        names: Sequence[str],
        address: str,
        port: int,
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._names = ("", *names)
        self.address = address
        self.port = port
        self.set_serving(False)

    def start(self) -> None:
        """Accept connections; health says NOT_SERVING until `set_serving`."""
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Answer health checks for "" and every service name; watchers are told."""
        for name in self._names:
            self._health.set(name, SERVING if serving else NOT_SERVING)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls at once, let running ones finish for `grace_s`, then cancel them; returns when the server is down."""
        self.set_serving(False)
        self._server.stop(grace_s).wait()

    def wait(self) -> None:
        """Block until the server is stopped."""
        self._server.wait_for_termination()


class AioServer:
    """A `grpc.aio.server` on one address; the same as `SyncServer`, awaited."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: health.aio.HealthServicer,
        names: Sequence[str],
        address: str,
        port: int,
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._names = ("", *names)
        self.address = address
        self.port = port

    async def start(self) -> None:
        """Accept connections; health says NOT_SERVING until `set_serving`."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks for "" and every service name; watchers are told."""
        for name in self._names:
            await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls at once, let running ones finish for `grace_s`, then cancel them."""
        await self.set_serving(False)
        await self._server.stop(grace_s)


def sync_server(
    address: str,
    servicers: Servicers,
    service_names: Sequence[str],
    *,
    max_workers: int = 32,
    max_message_bytes: int = INTERNAL_MESSAGE_LIMIT,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> SyncServer:
    """Build and bind a threaded server.

    Args:
        address: ``host:port`` (port 0 picks one) or ``unix:/path``, whose file gets mode 0600.
        servicers: What to serve.
        service_names: Full names, e.g. ``outrider.target.v1.Target``; for health and reflection.
        max_workers: Threads; every open stream occupies one.
        max_message_bytes: Limit in both directions.
        interceptors: Run inside the error interceptor, so they may raise `OutriderError`.

    Raises:
        ConfigurationError: the address is malformed or taken.
    """
    server = grpc.server(
        ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix="rpc"),
        interceptors=[ErrorInterceptor(), *interceptors],
        options=server_options(max_message_bytes),
    )
    health_servicer = PatientHealth()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _add(servicers, server)
    reflection.enable_server_reflection(_reflected(service_names), server)
    address, port = _bind(server, address)
    return SyncServer(server, health_servicer, service_names, address, port)


def aio_server(
    address: str,
    servicers: Servicers,
    service_names: Sequence[str],
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_LIMIT,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AioServer:
    """Build and bind an asyncio server; call it inside the running loop. Arguments and errors as for `sync_server`."""
    server = grpc.aio.server(
        interceptors=[AioErrorInterceptor(), *interceptors], options=server_options(max_message_bytes)
    )
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _add(servicers, server)
    reflection.enable_server_reflection(_reflected(service_names), server)
    address, port = _bind(server, address)
    return AioServer(server, health_servicer, service_names, address, port)


def _add(servicers: Servicers, server: grpc.Server | grpc.aio.Server) -> None:
    for add, servicer in servicers:
        add(servicer, server)


def _reflected(service_names: Sequence[str]) -> tuple[str, ...]:
    return (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)


def _bind(server: grpc.Server | grpc.aio.Server, address: str) -> tuple[str, int]:
    address = check_address(address, "listen")
    path = address.removeprefix("unix:") if address.startswith("unix:") else None
    # gRPC binds and listens in one step, so others are kept out by the mask; folders made meanwhile by other threads stay usable.
    mask = None if path is None else os.umask(0o077)
    try:
        port = server.add_insecure_port(address)
        if path is not None:
            os.chmod(path, 0o600)
    except (RuntimeError, OSError) as error:
        message = f"Cannot listen on {address}: {error}. Is another process using it?"
        raise ConfigurationError(message, field="listen", reason="address_in_use") from None
    finally:
        if mask is not None:
            os.umask(mask)
    if path is not None:
        return address, 0
    return f"{address.rpartition(':')[0]}:{port}", port
