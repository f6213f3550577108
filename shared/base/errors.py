"""The error hierarchy of all services, and the HTTP status of each kind of error.

All code of the services raises these errors. One gRPC interceptor (`shared.rpc.interceptors`) and one HTTP
exception handler (in the gateway) convert the errors to replies.
"""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """The kinds of errors.

    Each value is an HTTP status, which `shared.rpc.common_messages` maps to a gRPC status.
    """

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    PERMISSION_DENIED = 403
    NOT_FOUND = 404
    METHOD_NOT_ALLOWED = 405
    DEADLINE_EXCEEDED = 504
    PAYLOAD_TOO_LARGE = 413
    UNSUPPORTED_MEDIA_TYPE = 415
    RESOURCE_EXHAUSTED = 429
    CANCELLED = 499
    INTERNAL = 500
    UNIMPLEMENTED = 501
    UNAVAILABLE = 503


class OutriderError(Exception):
    """An error that is reported to the caller.

    Args:
        message: The problem and its fix, in one or two sentences.
        code: The kind of error. By default, the class's own `code`.
        reason: Machine-readable reason, e.g. ``context_length_exceeded``.
        field: The request field, flag, file or checkpoint key at fault, if there is one.
        retry_after_s: Number of seconds after which a retry may succeed. Used with the HTTP statuses 429 and
            503.
    """

    code = ErrorCode.INTERNAL
    reason = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.reason = reason or type(self).reason
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidRequestError(OutriderError):
    """A request field is wrong. The request had no effect."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "invalid_value"


class ModelNotFoundError(OutriderError):
    """The request names a model that this server does not serve."""

    code = ErrorCode.NOT_FOUND
    reason = "model_not_found"


class OverloadedError(OutriderError):
    """The queue is full. Retry after `retry_after_s` seconds."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "overloaded"


class DeadlineExceededError(OutriderError):
    """The request's deadline passed before the request finished."""

    code = ErrorCode.DEADLINE_EXCEEDED
    reason = "deadline_exceeded"


class CancelledError(OutriderError):
    """The client cancelled the request."""

    code = ErrorCode.CANCELLED
    reason = "cancelled"


class UnavailableError(OutriderError):
    """The service is starting or draining, or has lost a peer that it needs."""

    code = ErrorCode.UNAVAILABLE
    reason = "unavailable"


class CheckpointError(OutriderError):
    """A model folder cannot be loaded. `field` is the file, config key or tensor name at fault."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "bad_checkpoint"


class ConfigurationError(OutriderError):
    """A flag, environment variable or settings file is wrong. `field` names the one at fault."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "bad_configuration"


class ProtocolError(OutriderError):
    """A peer broke the protocol. Either the connection is dropped, or only the affected sequence."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "protocol_violation"


def wrong_size(received: int, expected: int) -> ProtocolError:
    """Return the error for a round's blob of a wrong size. Both sizes are in bytes."""
    return ProtocolError(f"The peer sent a blob of {received} bytes; expected {expected}.", field="rounds")
