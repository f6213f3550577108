"""Error replies over HTTP, in OpenAI's format. Routes, middleware and streams all use this module."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.services.gateway.request_note import current_note
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError
from outrider.shared.rpc.interceptors import as_outrider_error

TYPE_OF_CODE = {
    ErrorCode.INVALID_ARGUMENT: "invalid_request_error",
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.PERMISSION_DENIED: "permission_error",
    ErrorCode.NOT_FOUND: "invalid_request_error",
    ErrorCode.METHOD_NOT_ALLOWED: "invalid_request_error",
    ErrorCode.DEADLINE_EXCEEDED: "timeout_error",
    ErrorCode.PAYLOAD_TOO_LARGE: "invalid_request_error",
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: "invalid_request_error",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_error",
    ErrorCode.CANCELLED: "cancelled_error",
    ErrorCode.INTERNAL: "server_error",
    ErrorCode.UNIMPLEMENTED: "not_implemented_error",
    ErrorCode.UNAVAILABLE: "service_unavailable_error",
}
ANTHROPIC_TYPE_OF_CODE = {
    ErrorCode.INVALID_ARGUMENT: "invalid_request_error",
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.PERMISSION_DENIED: "permission_error",
    ErrorCode.NOT_FOUND: "not_found_error",
    ErrorCode.METHOD_NOT_ALLOWED: "invalid_request_error",
    ErrorCode.DEADLINE_EXCEEDED: "timeout_error",
    ErrorCode.PAYLOAD_TOO_LARGE: "request_too_large",
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: "invalid_request_error",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_error",
    ErrorCode.UNAVAILABLE: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"
# The clients of OpenAI and Anthropic retry requests that fail with status 408, 500 or above. The errors below
# would occur again, and each retry would cost as much as the first attempt.
NOT_TO_RETRY = frozenset([ErrorCode.DEADLINE_EXCEEDED, ErrorCode.INTERNAL, ErrorCode.UNIMPLEMENTED])
# Names of union branches that pydantic includes in the location of an error.
PLAIN_TAGS = frozenset(["str", "int", "float", "bool"])
TAG_PREFIXES = ("list[", "dict[", "tuple[", "function-", "constrained-", "literal[")


class JsonResponse(Response):
    """JSON in ASCII only. A reply can therefore quote any text of a client, including lone surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ErrorReply(JsonResponse):
    """An error reply.

    It also records its error for the request's log line and for the log of recent errors.
    """

    def __init__(self, error: OutriderError, body: Mapping[str, Any]) -> None:
        super().__init__(body, error.code.value, _error_headers(error))
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._error)
        await super().__call__(scope, receive, send)


def note_error(scope: Scope, error: OutriderError) -> None:
    """Record the error of a request in the request's state and in the note for its log line."""
    if (note := current_note.get()) is not None:
        note.error = error
    scope.setdefault("state", {})["error"] = error


def error_body(error: OutriderError) -> dict[str, Any]:
    """Return the body of an error reply."""
    return {
        "error": {
            "message": error.message,
            "type": TYPE_OF_CODE[error.code],
            "param": error.field,
            "code": error.reason,
        }
    }


def error_response(error: OutriderError) -> ErrorReply:
    """Return the complete error reply. It has a Retry-After header if the error has a retry delay."""
    return ErrorReply(error, error_body(error))


def _error_headers(error: OutriderError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code in NOT_TO_RETRY:
        headers["x-should-retry"] = "false"
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def anthropic_error_body(error: OutriderError) -> dict[str, Any]:
    """Return the body of an error reply in Anthropic's format."""
    kind = ANTHROPIC_TYPE_OF_CODE.get(error.code, "api_error")
    return {"type": "error", "error": {"type": kind, **_details(error)}}


def anthropic_error_response(error: OutriderError) -> ErrorReply:
    """Return the complete error reply in Anthropic's format."""
    return ErrorReply(error, anthropic_error_body(error))


def error_response_for(path: str, error: OutriderError) -> ErrorReply:
    """Return the complete error reply in the format of the API to which a path belongs."""
    anthropic = path.startswith(ANTHROPIC_PATH)
    return anthropic_error_response(error) if anthropic else error_response(error)


def _details(error: OutriderError) -> dict[str, Any]:
    return {"message": error.message, "param": error.field, "code": error.reason}


def error_event(error: OutriderError) -> dict[str, Any]:
    """Return the event that ends a streamed reply after an error.

    The HTTP status of the reply has already been sent. The event therefore contains the status of the error.
    """
    body = error_body(error)
    body["error"]["status"] = error.code.value
    return body


def install_handlers(app: FastAPI) -> None:
    """Register a handler for every exception that a route can raise."""

    def reply(request: Request, error: OutriderError) -> Response:
        return error_response_for(request.url.path, error)

    async def ours(request: Request, error: Exception) -> Response:
        return reply(request, as_outrider_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return reply(request, explain_validation(error.errors()))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = reply(request, _framework_error(error))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(OutriderError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def explain_validation(problems: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    """Return one error that names the first invalid field and lists all problems of that field."""
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "syntax error")
        return InvalidRequestError(f"The body is not valid JSON: {reason}.", reason="malformed_json")
    field = _field_of(first)
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"Unknown field: {field}.", field=field, reason="unknown_field")
    if first["type"] == "missing":
        return InvalidRequestError(f"Missing field: {field}.", field=field, reason="missing_field")
    messages = dict.fromkeys(
        str(problem["msg"]).removeprefix("Value error, ")
        for problem in problems
        if _field_of(problem) == field
    )
    if not field:
        return InvalidRequestError("The body must be a JSON object.", reason="malformed_json")
    return InvalidRequestError(f"{field}: {'; or: '.join(messages)}.", field=field)


def _field_of(problem: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for part in problem["loc"]:
        if isinstance(part, str) and parts and (part in PLAIN_TAGS or part.startswith(TAG_PREFIXES)):
            break
        parts.append(str(part))
    return ".".join(parts[1:] if parts[:1] in (["body"], ["query"]) else parts)


def _framework_error(error: HTTPException) -> OutriderError:
    """Convert a framework's error: unknown path, wrong method, or a body that cannot be decoded as text."""
    if error.status_code == 404:
        return OutriderError("This path does not exist.", code=ErrorCode.NOT_FOUND, reason="not_found")
    if error.status_code == 400:
        return InvalidRequestError("The body cannot be read as JSON.", reason="malformed_json")
    return OutriderError(f"{error.detail}.", code=ErrorCode.METHOD_NOT_ALLOWED, reason="method_not_allowed")
