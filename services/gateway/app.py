"""Assembles and runs the gateway: REST and gRPC on one event loop, with a graceful drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.errors import install_handlers
from outrider.services.gateway.guards.connections import HEAD_LIMIT_BYTES, ConnectionGuard
from outrider.services.gateway.guards.open_files import (
    ACCEPTED_AT_ONCE,
    connection_cap,
    limit_accept_errors,
    raise_file_limit,
)
from outrider.services.gateway.http_methods import HeadAsGet, add_options
from outrider.services.gateway.middleware import (
    REQUEST_ID_HEADER,
    Authentication,
    BodyGuard,
    RequestContext,
    request_refuser,
)
from outrider.services.gateway.playground.pages import load_files
from outrider.services.gateway.routes import (
    anthropic,
    chat,
    completions,
    loads,
    models,
    native,
    ops,
    responses,
    sglang_admin,
)
from outrider.services.gateway.routes.context import IGNORED_HEADER
from outrider.services.gateway.routes.playground import playground_router
from outrider.services.gateway.servicer import (
    SERVICE_NAME,
    AuthInterceptor,
    InferenceServicer,
    error_recorder,
    register_gateway,
)
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.gateway.tokenizer import close_templates, start_templates
from outrider.shared.base.errors import ConfigurationError, OutriderError
from outrider.shared.base.garbage import freeze_objects
from outrider.shared.base.lifecycle import watch_stop_signals
from outrider.shared.base.version import installed_version
from outrider.shared.obs.logging import configure_logging, get_logger
from outrider.shared.rpc.certificate_files import CHECK_S, CertificateFiles
from outrider.shared.rpc.server import AioServer, aio_server

PUBLIC_PATHS = frozenset(["/health", "/ping", "/ready"])
ROUTES = (chat, completions, responses, anthropic, native, sglang_admin, loads, models, ops)
UNSENT_BYTES = 128 * 1024
"""Number of bytes above which the kernel accepts no more bytes for a connection, until it can send some."""
BACKLOG = 2048
# Seconds to flush the last bytes of replies after the grace period.
HTTP_STOP_S = 2
# The size limit of gRPC replies, as a multiple of the limit of request bodies. A reply that was delayed by a
# pause may contain many traced rounds.
GRPC_REPLY_SLACK = 4
# A client that uses its gRPC connection again after this time connects again, within milliseconds. Without a
# limit, connections without calls would keep others out.
GRPC_IDLE_S = 300.0
# Interval at which the gateway looks for a changed keys file.
KEYS_POLL_S = 1.0
_log = get_logger("outrider.gateway")


def create_app(core: GatewayCore) -> FastAPI:
    """Return the REST application over `core`."""
    app = FastAPI(
        title="Outrider",
        description="Serves large language models with speculative decoding.",
        version=installed_version(),
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.core = core
    routers = [module.router for module in ROUTES]
    settings = core.settings
    public_paths = PUBLIC_PATHS | ({"/metrics"} if settings.public_metrics else frozenset())
    if settings.playground:
        files = load_files()
        guarded = load_files(needs_key=True)
        routers.append(playground_router(files, guarded, lambda: core.ring.guarded))
        public_paths |= files.keys()
    for router in routers:
        app.include_router(router)
    add_options(app, routers)
    install_handlers(app)
    # The middleware added last runs first. The order is therefore context, CORS, authentication, body guard.
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyGuard, max_bytes=settings.max_body_bytes)
    app.add_middleware(Authentication, ring=core.ring, public_paths=public_paths)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER, "Retry-After"],
        )
    app.add_middleware(RequestContext, metrics=core.metrics, errors=core.errors, tracer=core.tracer)
    _describe_validation(app)
    return app


class GatewayServer:
    """A running gateway. Call `start` to begin serving and `drain` to shut down.

    Attributes:
        core: The gateway core that REST and gRPC share.
        port: Port on which the REST API listens.
        grpc_port: Port on which the gRPC API listens. The value is 0 before `start` and if gRPC is disabled.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        settings.check()
        self._settings = settings
        self.core = GatewayCore(settings)
        self._socket = _bind(settings.host, settings.port)
        self.port = int(self._socket.getsockname()[1])
        self.grpc_port = 0
        self._grpc: AioServer | None = None
        self._http: _QuietServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._readiness: asyncio.Task[None] | None = None
        self._keys: asyncio.Task[None] | None = None
        self._certificates: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the REST and gRPC servers. The gateway becomes ready when the target becomes ready."""
        settings = self._settings
        # The limit of gRPC connections depends on the limit of open files.
        open_files = raise_file_limit()
        limit_accept_errors(asyncio.get_running_loop())
        # The templates are compiled in other processes, while this process builds the REST application.
        templates = start_templates(self.core.codecs.values())
        app = create_app(self.core)
        await asyncio.gather(*map(asyncio.wrap_future, templates))
        await self.core.targets.start()
        if settings.grpc_port:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            self._grpc = aio_server(
                f"{host}:{settings.grpc_port}",
                [(register_gateway, InferenceServicer(self.core))],
                [SERVICE_NAME],
                max_message_bytes=GRPC_REPLY_SLACK * settings.max_body_bytes,
                max_received_bytes=settings.max_body_bytes,
                max_idle_s=GRPC_IDLE_S,
                interceptors=[AuthInterceptor(self.core.ring)],
                security=settings.front_security(),
                on_error=error_recorder(self.core),
            )
            self.grpc_port = self._grpc.port
            await self._grpc.start()
        guard = ConnectionGuard(
            connection_cap(settings.max_connections, open_files),
            settings.head_timeout_s,
            settings.unread_timeout_s,
            settings.slow_reader_timeout_s + settings.unread_timeout_s,
            request_refuser(self.core.metrics, self.core.errors),
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            h11_max_incomplete_event_size=HEAD_LIMIT_BYTES,
            # No route uses WebSockets, whose connections the guard could not follow.
            ws="none",
            http=guard.protocol,  # type: ignore[arg-type]  # uvicorn only calls it
            backlog=ACCEPTED_AT_ONCE,
            timeout_graceful_shutdown=HTTP_STOP_S,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            ssl_ca_certs=None if settings.tls_ca is None else str(settings.tls_ca),
            ssl_cert_reqs=ssl.CERT_NONE if settings.tls_ca is None else ssl.CERT_REQUIRED,
        )
        config.load()
        # The guard encrypts connections itself, because it counts them before the TLS handshake.
        guard.tls, config.ssl = config.ssl, None
        self._http = _QuietServer(config)
        self._http_task = asyncio.create_task(self._http.serve([self._socket]), name="http")
        self._readiness = asyncio.create_task(self._follow_target(), name="readiness")
        if settings.api_keys_file is not None:
            self._keys = asyncio.create_task(self._follow_keys(), name="keys")
        if (files := settings.front_security().files) is not None and guard.tls is not None:
            self._certificates = asyncio.create_task(
                self._follow_certificates(guard.tls, files), name="certificates"
            )

    async def drain(self) -> None:
        """Shut the gateway down gracefully, in these steps:

        1. Report not ready.
        2. Accept requests for another `drain_notice_s` seconds, so that load balancers notice the new state.
        3. Refuse new requests. Let running requests finish for up to `drain_grace_s` seconds.
        4. Stop the REST and gRPC servers.
        """
        settings, core = self._settings, self.core
        core.lifecycle.draining = True
        for task in (self._readiness, self._keys, self._certificates):
            if task:
                task.cancel()
        if self._grpc:
            await self._grpc.set_serving(False)
        await asyncio.sleep(settings.drain_notice_s)
        core.lifecycle.admitting = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_grace_s):
                await core.lifecycle.idle.wait()
        if self._grpc:
            await self._grpc.stop(1.0 if core.lifecycle.idle.is_set() else 0.0)
        if self._http and self._http_task:
            self._http.should_exit = True
            await self._http_task
        await core.targets.close()
        close_templates(core.codecs.values())
        self._socket.close()
        await asyncio.to_thread(core.tracer.close)

    async def failed(self) -> None:
        """Return when the HTTP server ends on its own."""
        assert self._http_task is not None
        await asyncio.wait({self._http_task})

    async def _follow_keys(self) -> None:
        """Reload the keys file whenever it changes."""
        while True:
            await asyncio.sleep(KEYS_POLL_S)
            self.core.ring.reload_if_changed()

    async def _follow_certificates(self, tls: ssl.SSLContext, files: CertificateFiles) -> None:
        """Use renewed certificates for new REST connections. gRPC reads its certificates itself."""
        settings = self._settings
        while True:
            await asyncio.sleep(CHECK_S)
            if files.changed() is None:
                continue
            assert settings.tls_cert is not None
            tls.load_cert_chain(settings.tls_cert, settings.tls_key)
            if settings.tls_ca is not None:
                tls.load_verify_locations(settings.tls_ca)

    async def _follow_target(self) -> None:
        """Log `ready` once, and report the target's readiness in gRPC health checks."""
        announced = False
        while True:
            await self.core.targets.readiness.wait_for(True)
            if self._grpc:
                await self._grpc.set_serving(True)
            if not announced:
                scheme = "http" if self._settings.tls_cert is None else "https"
                url = f"{scheme}://{self._settings.host}:{self.port}"
                _log.info("ready", url=url, grpc_port=self.grpc_port or None)
                announced = True
            await self.core.targets.readiness.wait_for(False)
            if self._grpc:
                await self._grpc.set_serving(False)


def run(settings: GatewaySettings) -> int:
    """Serve until the process receives SIGTERM or SIGINT, then drain the gateway.

    If the configuration is invalid, log an error that includes the fix.

    Returns:
        The exit code of the process.
    """
    configure_logging("gateway", settings.log_level, settings.log_json)
    try:
        settings.secure_process()
        return asyncio.run(_serve(settings))
    except OutriderError as error:
        _log.error("cannot start", error=error.message, field=error.field)
        print(error.message, file=sys.stderr)
        return 1


async def _serve(settings: GatewaySettings) -> int:
    _log.info("settings", **settings.for_log())
    server = GatewayServer(settings)
    stop = asyncio.Event()
    restore = watch_stop_signals(stop)
    try:
        await server.start()
        freeze_objects()
        ended = asyncio.create_task(server.failed())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        # From here on, a second signal kills the process immediately.
        restore()
        _log.info("draining")
        await server.drain()
        await asyncio.gather(ended, stopped, return_exceptions=True)
        return 0 if stop.is_set() else 1
    finally:
        restore()


class _QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signal handling to the gateway.

    uvicorn's own signal handler would stop listening before the gateway has reported that it is not ready.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on the given sockets.

        asyncio sets the listen backlog of a socket to the number of connections that it accepts in one step.
        This method therefore sets the intended backlog afterwards.
        """
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol. Without TCP_NODELAY, replies would
    # be 40 ms late.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit this option. Without it, the kernel would buffer megabytes for a client
        # that does not read, and the gateway would notice such a client late. Some sandboxes lack the option.
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Choose another --port.", field="port"
        ) from None
    return listener


def _describe_validation(app: FastAPI) -> None:
    """Remove status 422 from the OpenAPI document, because the gateway answers invalid requests with 400."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
