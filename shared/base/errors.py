"""One error hierarchy. Domain code raises these; one gRPC interceptor and one HTTP exception handler map them (error table)."""

from __future__ import annotations

from enum import Enum


class ErrorCode(Enum):
    """A row of the error table; the value is the HTTP status. The gRPC mapping lives in shared/rpc/interceptors.py."""

    INVALID_ARGUMENT = 400
    UNAUTHENTICATED = 401
    NOT_FOUND = 404
    DEADLINE_EXCEEDED = 504
    PAYLOAD_TOO_LARGE = 413
    UNSUPPORTED_MEDIA_TYPE = 415
    RESOURCE_EXHAUSTED = 429
    CANCELLED = 499
    INTERNAL = 500
    UNIMPLEMENTED = 501
    UNAVAILABLE = 503


class OutriderError(Exception):
    """An error that a caller is told about.

    Args:
        message: What is wrong and what to do about it, in one or two sentences.
        code: The row of the error table.
        reason: Machine-readable reason, e.g. ``context_length_exceeded``.
        field: The request field, flag, file or checkpoint key at fault, if there is one.
        retry_after_s: Seconds after which a retry may succeed, for 429 and 503.
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
    """A request field is wrong; nothing was done."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "invalid_value"


class ModelNotFoundError(OutriderError):
    """The request names a model that is not served here."""

    code = ErrorCode.NOT_FOUND
    reason = "model_not_found"


class OverloadedError(OutriderError):
    """The queue is full; `retry_after_s` says when to come back."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    reason = "overloaded"


class DeadlineExceededError(OutriderError):
    """The request's deadline passed before it finished."""

    code = ErrorCode.DEADLINE_EXCEEDED
    reason = "deadline_exceeded"


class CancelledError(OutriderError):
    """The client cancelled the request."""

    code = ErrorCode.CANCELLED
    reason = "cancelled"


class UnavailableError(OutriderError):
    """The service is starting, draining, or lost a peer that it needs."""

    code = ErrorCode.UNAVAILABLE
    reason = "unavailable"


class CheckpointError(OutriderError):
    """A model folder that cannot be loaded: `field` is the file, config key or tensor name."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "bad_checkpoint"


class ConfigurationError(OutriderError):
    """A flag, environment variable or settings file is wrong: `field` names it."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "bad_configuration"


class ProtocolError(OutriderError):
    """A peer broke the protocol; the connection or the one sequence concerned is dropped."""

    code = ErrorCode.INVALID_ARGUMENT
    reason = "protocol_violation"
