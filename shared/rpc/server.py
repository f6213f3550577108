"""Builds gRPC servers, sync and asyncio, with error mapping, limits, keepalive, health checks and reflection.

A server's health status is NOT_SERVING at first. The service calls `set_serving(True)` after its warm-up.
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
from outrider.shared.rpc.interceptors import AioErrorInterceptor, ErrorInterceptor, OnError, ignore_error
from outrider.shared.rpc.options import INTERNAL_MESSAGE_LIMIT, server_options
from outrider.shared.rpc.peer_security import NO_SECURITY, PeerSecurity, of_this_process
from outrider.shared.rpc.peer_token import AioTokenCheck, TokenCheck

Servicers = Sequence[tuple[Callable[[Any, Any], None], object]]
"""Pairs of a generated function ``add_XServicer_to_server`` and its servicer."""

# Health Watch calls have their own threads, so that watchers never occupy all workers.
HEALTH_WORKERS = 4
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class PatientHealth(health.HealthServicer):  # type: ignore[misc]  # the library has no types
    """gRPC health service whose watchers may disconnect at any time.

    grpc's own health service removes a watcher under a lock, on the thread that also completes sends. It
    holds the same lock while it waits until a status has been sent. A watcher that disconnects at that moment
    would therefore block the whole server. This class removes watchers on the threads of the health checks
    instead.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=HEALTH_WORKERS, thread_name_prefix="health")
        super().__init__(experimental_non_blocking=True, experimental_thread_pool=self._pool)

    def Watch(self, request: Any, context: Any, send_response_callback: Any = None) -> Any:
        """Watch a service's status. A health worker handles the end of the call."""
        return super().Watch(request, _CallsBackElsewhere(context, self._pool), send_response_callback)


class _CallsBackElsewhere:
    """The part of a call's context that `Watch` uses. Callbacks run on a thread pool."""

    def __init__(self, context: Any, pool: ThreadPoolExecutor) -> None:
        self._context = context
        self._pool = pool

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Run `callback` on the pool when the call ends. Return False if the call has already ended."""
        return bool(self._context.add_callback(lambda: self._pool.submit(callback)))


class SyncServer:
    """A `grpc.server` on one address. `port` is the bound TCP port, or 0 for a unix socket."""

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
        """Accept connections. Health reports NOT_SERVING until `set_serving`."""
        self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Set the health status of "" and of every service name, and notify watchers."""
        for name in self._names:
            self._health.set(name, SERVING if serving else NOT_SERVING)

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, cancel running calls after `grace_s` seconds, and wait until all have ended."""
        self.set_serving(False)
        self._server.stop(grace_s).wait()

    def wait(self) -> None:
        """Block until the server is stopped."""
        self._server.wait_for_termination()


class AioServer:
    """A `grpc.aio.server` on one address: the asyncio counterpart of `SyncServer`."""

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
        """Accept connections. Health reports NOT_SERVING until `set_serving`."""
        await self.set_serving(False)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """Set the health status of "" and of every service name, and notify watchers."""
        for name in self._names:
            await self._health.set(name, SERVING if serving else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls immediately, and cancel running calls after `grace_s` seconds."""
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
    security: PeerSecurity | None = None,
) -> SyncServer:
    """Build a gRPC server that uses threads, and bind it to its address.

    Args:
        address: ``host:port`` (port 0 picks a free one) or ``unix:/path``, whose file gets mode 0600.
        servicers: The servicers to add.
        service_names: Full names of the services, e.g. ``outrider.target.v1.Target``, for health and
            reflection.
        max_workers: Number of threads. Every open stream occupies one thread.
        max_message_bytes: Largest message to send or receive, in bytes.
        interceptors: Further interceptors. They may raise `OutriderError`, because they run inside the error
            interceptor.
        security: TLS and token, for TCP addresses. If None, the server uses the settings of this process
            (`peer_security`).

    Raises:
        ConfigurationError: The address is malformed or in use.
    """
    security = _applied(security, address)
    checks = [TokenCheck(security.token)] if security.token else []
    server = grpc.server(
        ThreadPoolExecutor(max_workers=max_workers, thread_name_prefix="rpc"),
        interceptors=[ErrorInterceptor(), *checks, *interceptors],
        options=server_options(max_message_bytes),
    )
    health_servicer = PatientHealth()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _add(servicers, server)
    reflection.enable_server_reflection(_reflected(service_names), server)
    address, port = _bind(server, address, security)
    return SyncServer(server, health_servicer, service_names, address, port)


def aio_server(
    address: str,
    servicers: Servicers,
    service_names: Sequence[str],
    *,
    max_message_bytes: int = INTERNAL_MESSAGE_LIMIT,
    max_received_bytes: int | None = None,
    max_idle_s: float | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    security: PeerSecurity | None = None,
    on_error: OnError = ignore_error,
) -> AioServer:
    """Build a gRPC server for asyncio, and bind it to its address.

    Call this inside the running event loop. `max_received_bytes` is the largest message to receive, by
    default `max_message_bytes`. If `max_idle_s` is set, a connection without calls is closed after this
    number of seconds. `on_error` is called for each call that fails with an error. The other arguments and
    the errors are those of `sync_server`.
    """
    security = _applied(security, address)
    checks = [AioTokenCheck(security.token)] if security.token else []
    server = grpc.aio.server(
        interceptors=[AioErrorInterceptor(on_error), *checks, *interceptors],
        options=server_options(max_message_bytes, max_received_bytes, max_idle_s),
    )
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    _add(servicers, server)
    reflection.enable_server_reflection(_reflected(service_names), server)
    address, port = _bind(server, address, security)
    return AioServer(server, health_servicer, service_names, address, port)


def _add(servicers: Servicers, server: grpc.Server | grpc.aio.Server) -> None:
    for add, servicer in servicers:
        add(servicer, server)


def _reflected(service_names: Sequence[str]) -> tuple[str, ...]:
    return (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)


def _applied(security: PeerSecurity | None, address: str) -> PeerSecurity:
    if address.startswith("unix:"):
        return NO_SECURITY
    return of_this_process() if security is None else security


def _bind(server: grpc.Server | grpc.aio.Server, address: str, security: PeerSecurity) -> tuple[str, int]:
    address = check_address(address, "listen")
    path = address.removeprefix("unix:") if address.startswith("unix:") else None
    # gRPC binds and listens in one step, so only the umask keeps other users out. Other threads may create
    # folders in the meantime; those remain usable for this user.
    mask = None if path is None else os.umask(0o077)
    try:
        credentials = security.server_credentials()
        port = (
            server.add_insecure_port(address)
            if credentials is None
            else server.add_secure_port(address, credentials)
        )
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
