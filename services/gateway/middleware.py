"""HTTP middleware: request ids and log lines, authentication, and checks of the request body."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.services.gateway.errors import error_response, error_response_for, note_error
from outrider.services.gateway.guards.framing import ambiguous_framing
from outrider.services.gateway.guards.json_body import LARGE_BODY, parse_body
from outrider.services.gateway.guards.parsed_body import keep_parsed
from outrider.services.gateway.keys.admin_routes import ADMIN_PATHS
from outrider.services.gateway.keys.caller import Caller, current_caller
from outrider.services.gateway.keys.key_ring import KeyRing
from outrider.services.gateway.metrics import GatewayMetrics
from outrider.services.gateway.playground.pages import PAGES
from outrider.services.gateway.recent_errors import RecentErrors
from outrider.services.gateway.request_note import RequestNote, current_note
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError
from outrider.shared.obs.logging import get_logger, log_context
from outrider.shared.obs.tracing import TRACEPARENT, Tracer, checked_traceparent
from outrider.shared.rpc.interceptors import as_outrider_error

REQUEST_ID_HEADER = "X-Request-Id"
BODY_TIMEOUT_S = 30.0
READINESS_ROUTE = "/ready"
# Health probes, routers and open pages send these requests all the time.
QUIET_ROUTES = frozenset(
    ["/health", "/ping", READINESS_ROUTE, "/metrics", "/status.json", "/get_load", "/v1/loads", *PAGES]
)
UNKNOWN_ROUTE = "other"
# Some clients send these POST requests without a body and without a content type.
BODILESS_PATHS = frozenset(["/flush_cache", "/ping"])
NOT_IMPLEMENTED = 501
# The parser's messages quote the line at fault, which may contain an API key.
_QUOTED_LINE = re.compile(r":? *(bytearray\(|b['\"]).*", re.DOTALL)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_JSON_TYPE = re.compile(r"application/(json|[\w.+-]+\+json)")
_log = get_logger("outrider.gateway.http")


def request_id_of(given: str | None) -> str:
    """Return the client's request id if it is printable and short, or a new id otherwise."""
    return given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def framing_refusal(path: str) -> Response:
    """Return the error reply to a request of ambiguous length. The reply closes the connection."""
    error = InvalidRequestError(
        "The request has both Content-Length and Transfer-Encoding.", field="Content-Length"
    )
    reply = error_response_for(path, error)
    reply.headers["Connection"] = "close"
    return reply


def request_refuser(
    metrics: GatewayMetrics, errors: RecentErrors
) -> Callable[[h11.RemoteProtocolError], tuple[int, list[tuple[bytes, bytes]], bytes]]:
    """Return a function that refuses bytes that are not a valid HTTP request.

    The function counts and logs the request, and returns the status, the headers and the body of the reply.
    """

    def refuse(problem: h11.RemoteProtocolError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        status = problem.error_status_hint
        error = OutriderError(
            f"The request is not valid HTTP: {_QUOTED_LINE.sub('', str(problem)).rstrip('.')}.",
            code=ErrorCode.UNIMPLEMENTED if status == NOT_IMPLEMENTED else ErrorCode.INVALID_ARGUMENT,
            reason="malformed_request",
        )
        reply = error_response(error)
        request_id = reply.headers[REQUEST_ID_HEADER] = request_id_of(None)
        metrics.http_requests.labels(UNKNOWN_ROUTE, str(status)).inc()
        errors.record(error, UNKNOWN_ROUTE, request_id)
        _log.info("malformed request", status=status, error=error.message, request_id=request_id)
        return status, reply.raw_headers, bytes(reply.body)

    return refuse


def _is_quiet(method: str, route: str, status: int) -> bool:
    """Return True for a request that would only flood the log, such as a browser's search for an icon."""
    if route == UNKNOWN_ROUTE:
        return method in ("GET", "HEAD") and status == ErrorCode.NOT_FOUND.value
    return route in QUIET_ROUTES or route.startswith("/playground/")


class RequestContext:
    """Outermost HTTP middleware: assigns request ids, logs requests and counts them.

    Every reply has a request id, and every request is logged and counted once. An exception becomes an error
    reply, unless the reply has already begun. If tracing is enabled, every POST request has a span.
    """

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, errors: RecentErrors, tracer: Tracer | None = None
    ) -> None:
        self._app = app
        self._tracer = tracer or Tracer()
        self._metrics = metrics
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get(REQUEST_ID_HEADER))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0
        started = time.perf_counter()

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        note = RequestNote()
        if scope["method"] == "POST":
            note.span = self._tracer.begin("POST", checked_traceparent(headers.get(TRACEPARENT)))
        # The context variable needs no reset, because this task's context ends with the request.
        current_note.set(note)
        with log_context(request_id=request_id):
            try:
                if ambiguous_framing(scope):
                    await framing_refusal(scope["path"])(scope, receive, tagged)
                    return
                await self._app(scope, receive, tagged)
            except Exception as error:
                failure = as_outrider_error(error)
                note_error(scope, failure)
                if status:
                    raise
                await error_response_for(scope["path"], failure)(scope, receive, tagged)
            finally:
                # Unknown paths share one label. Otherwise clients could create any number of labels.
                route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
                self._metrics.http_requests.labels(route, str(status or ErrorCode.CANCELLED.value)).inc()
                # "Not ready" is the answer that a readiness probe asks for, and no error.
                failure = scope["state"].get("error")
                if isinstance(failure, OutriderError) and route != READINESS_ROUTE:
                    self._errors.record(failure, route, request_id)
                elapsed_ms = round((time.perf_counter() - started) * 1e3, 1)
                log = _log.debug if _is_quiet(scope["method"], route, status) else _log.info
                log(
                    "request",
                    method=scope["method"],
                    route=route,
                    status=status or ErrorCode.CANCELLED.value,
                    elapsed_ms=elapsed_ms,
                    **note.fields(),
                )
                note.end_span(
                    f"{scope['method']} {route}",
                    http__request__method=scope["method"],
                    http__route=route,
                    http__response__status_code=status or ErrorCode.CANCELLED.value,
                    outrider__request_id=request_id,
                )


class Authentication:
    """HTTP middleware that identifies callers by their API keys, and checks the permissions of the keys.

    The middleware applies only limits that do not depend on the body. Public paths need no key, and admin
    paths need an admin key. Every POST request counts towards the key's limit of requests per minute. If the
    gateway has no keys, every request is allowed.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, public_paths: frozenset[str]) -> None:
        self._app = app
        self._ring = ring
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._public_paths:
            try:
                headers = Headers(scope=scope)
                # Anthropic's clients send the key in the header x-api-key.
                key = headers.get("x-api-key")
                caller = self._ring.identify(headers.get("authorization") or (key and f"Bearer {key}"))
            except OutriderError as error:
                await error_response_for(scope["path"], error)(scope, receive, send)
                return
            if caller is not None:
                await self._serve(caller, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _serve(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in caller.headers().items():
                    headers[name] = value
            await send(message)

        # The context variable needs no reset, because this task's context ends with the request.
        current_caller.set(caller)
        if (note := current_note.get()) is not None:
            note.key = caller.name
        try:
            if scope["path"] in ADMIN_PATHS:
                caller.check_admin(scope["path"])
            elif scope["method"] == "POST":
                caller.count_request()
        except OutriderError as error:
            await error_response_for(scope["path"], error)(scope, receive, with_limits)
            return
        await self._app(scope, receive, with_limits)


class BodyGuard:
    """HTTP middleware that reads and checks the whole body before the request reaches its route.

    The body must be JSON of at most `max_bytes` bytes, and must arrive within `BODY_TIMEOUT_S` seconds.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with_body = scope["type"] == "http" and scope["method"] in ("POST", "PUT", "PATCH")
        if not with_body or scope["path"] in BODILESS_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
            if not _JSON_TYPE.fullmatch(content_type):
                message = f"The content type must be application/json, not {content_type[:64]!r}."
                raise OutriderError(
                    message,
                    code=ErrorCode.UNSUPPORTED_MEDIA_TYPE,
                    reason="unsupported_media_type",
                    field="Content-Type",
                )
            length = headers.get("content-length", "")
            if length.isdigit() and int(length) > self._max_bytes:
                raise self._too_large()
            body = await self._read(receive)
            parsed = None if body is None else parse_body(body)
        except OutriderError as error:
            await error_response_for(scope["path"], error)(scope, receive, send)
            return
        if body is None:
            return
        if len(body) > LARGE_BODY:
            # The route's validation takes about as long as parsing. Let other requests' streams run in
            # between.
            await asyncio.sleep(0)
        delivered = False

        async def replay() -> Message:
            nonlocal delivered
            if delivered:
                return await receive()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        keep_parsed(scope, parsed)
        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnected before the body was complete."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    parts.append(part)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            message_text = f"The body did not arrive within {BODY_TIMEOUT_S:g} s."
            raise OutriderError(
                message_text, code=ErrorCode.DEADLINE_EXCEEDED, reason="body_timeout"
            ) from None
        return b"".join(parts)

    def _too_large(self) -> OutriderError:
        message = f"The body is larger than {self._max_bytes} bytes."
        return OutriderError(message, code=ErrorCode.PAYLOAD_TOO_LARGE, reason="body_too_large")
