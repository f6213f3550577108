"""Converts `OutriderError` to and from its two wire formats.

Inside a stream, an error is a ``common.v1.ErrorDetail``. At the end of a call, it is a ``google.rpc.Status``.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from outrider.common.v1 import common_pb2
from outrider.shared.base.errors import ErrorCode, OutriderError
from outrider.shared.base.generation import RoundTrace, SpeculationReport

ERROR_DOMAIN = "outrider"

STATUS_OF_CODE: dict[ErrorCode, grpc.StatusCode] = {
    ErrorCode.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.METHOD_NOT_ALLOWED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.PAYLOAD_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}

CODE_OF_STATUS: dict[grpc.StatusCode, ErrorCode] = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE: ErrorCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED: ErrorCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND: ErrorCode.NOT_FOUND,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: ErrorCode.UNAVAILABLE,
}


def error_to_proto(error: OutriderError) -> common_pb2.ErrorDetail:
    """Return the error as a message for a stream that stays open."""
    detail = common_pb2.ErrorDetail(
        status=error.code.value, reason=error.reason, message=error.message, field=error.field or ""
    )
    if error.retry_after_s is not None:
        detail.retry_after_s = error.retry_after_s
    return detail


def error_from_proto(detail: common_pb2.ErrorDetail) -> OutriderError:
    """Return the error that a peer's message describes. An unknown status becomes an internal error."""
    return OutriderError(
        detail.message or "The peer gave no reason.",
        code=_code_of_http(detail.status),
        reason=detail.reason or None,
        field=detail.field or None,
        retry_after_s=detail.retry_after_s if detail.HasField("retry_after_s") else None,
    )


def error_to_status(error: OutriderError) -> status_pb2.Status:
    """Convert an `OutriderError` to a ``google.rpc.Status``.

    The status details always contain ErrorInfo. They contain BadRequest if the error names a field, and
    RetryInfo if the error names a delay.
    """
    metadata = {"http_status": str(error.code.value)}
    details = [
        _pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))
    ]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    # The value of a grpc.StatusCode is a (number, name) pair.
    return status_pb2.Status(code=STATUS_OF_CODE[error.code].value[0], message=error.message, details=details)


def error_from_status(status: status_pb2.Status, code: grpc.StatusCode) -> OutriderError:
    """Convert a ``google.rpc.Status`` to an `OutriderError`.

    `code` is the status code of the call. It determines the kind of error if the peer sent no ErrorInfo.
    """
    error = OutriderError(status.message, code=CODE_OF_STATUS.get(code, ErrorCode.INTERNAL))
    for detail in status.details:
        info, bad_request, retry = (
            error_details_pb2.ErrorInfo(),
            error_details_pb2.BadRequest(),
            error_details_pb2.RetryInfo(),
        )
        if detail.Unpack(info):
            error.reason = info.reason or error.reason
            http_status = info.metadata.get("http_status", "")
            if http_status.isdigit():
                error.code = _code_of_http(int(http_status))
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            error.field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return error


def _pack(
    message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _code_of_http(status: int) -> ErrorCode:
    try:
        return ErrorCode(status)
    except ValueError:
        return ErrorCode.INTERNAL


def report_to_proto(report: SpeculationReport) -> common_pb2.SpeculationStats:
    """Convert the speculation statistics of a sequence to protobuf."""
    return common_pb2.SpeculationStats(
        accept_length=report.accept_length,
        rounds=report.rounds,
        draft_tokens=report.draft_tokens,
        accepted_tokens=report.accepted_tokens,
        accepted_histogram=report.accepted_histogram,
        fallback_reason=report.fallback_reason,
        speedup_estimate=report.speedup_estimate,
    )


def round_to_proto(one: RoundTrace) -> common_pb2.RoundTrace:
    """Convert one traced round to protobuf."""
    return common_pb2.RoundTrace(
        round=one.round,
        base_len=one.base_len,
        nodes=[
            common_pb2.TraceNode(
                token=node.token,
                parent=node.parent,
                depth=node.depth,
                logprob=node.logprob,
                text=node.text,
            )
            for node in one.nodes
        ],
        accepted=one.accepted,
        emitted=one.emitted,
        draft_ms=one.draft_ms,
        verify_ms=one.verify_ms,
        reason=one.reason,
        emitted_text=one.emitted_text,
    )
