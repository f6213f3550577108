"""gRPC interceptors that turn an `OutriderError` into a status, and client functions that turn it back.

Servicers raise `OutriderError`. They never call ``context.abort``, because this call raises a bare
`Exception` that broad handlers would swallow. A request message that does not parse becomes INVALID_ARGUMENT.
Any other exception becomes INTERNAL. The traceback of such an exception appears only in this service's log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.common_messages import CODE_OF_STATUS, error_from_status, error_to_status

STATUS_DETAILS_KEY = "grpc-status-details-bin"
_log = get_logger("outrider.rpc")

# grpcio has no usable types for handlers and contexts. The untyped values stay inside this module.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Behaviour = Callable[[Any, Any], Any]
_Note = Callable[[OutriderError], None]
OnError: TypeAlias = "Callable[[grpc.HandlerCallDetails, OutriderError], None]"
"""Called with a failed call and its error, on the task of the call."""


class _Malformed:
    """Marks a request message that did not parse."""


def error_from_rpc(error: grpc.RpcError | grpc.aio.AioRpcError) -> OutriderError:
    """Return the domain error of a failed call. Accepts errors of grpc's synchronous and asyncio stacks."""
    call = cast(grpc.Call, error)
    code = call.code()
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                break
            return error_from_status(status, code)
    reason = code.name.lower() if code is not None else "unknown"
    return OutriderError(
        call.details() or reason, code=CODE_OF_STATUS.get(code, ErrorCode.INTERNAL), reason=reason
    )


def as_outrider_error(error: Exception) -> OutriderError:
    """Return `error` if it is an `OutriderError`.

    Otherwise log its traceback and return an INTERNAL error without details.
    """
    if isinstance(error, OutriderError):
        return error
    _log.error("unhandled error", exc_info=error)
    return OutriderError("Internal error; the service's log has the details.", reason="internal_error")


class ErrorInterceptor(grpc.ServerInterceptor):
    """Maps errors to statuses for `grpc.server`."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        try:
            handler = continuation(handler_call_details)
        except OutriderError as error:
            return _refusing(_guard_stream, error)
        return None if handler is None else _wrap(handler, _guard_unary, _guard_stream)


def ignore_error(_details: grpc.HandlerCallDetails, _error: OutriderError) -> None:
    """Do nothing."""


class AioErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors to statuses for `grpc.aio.server`, and reports each failed call to `on_error`."""

    def __init__(self, on_error: OnError = ignore_error) -> None:
        self._on_error = on_error

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        note = partial(self._on_error, handler_call_details)
        unary, stream = partial(_guard_aio_unary, note), partial(_guard_aio_stream, note)
        try:
            handler = await continuation(handler_call_details)
        except OutriderError as error:
            return _refusing(stream, error)
        return None if handler is None else _wrap(handler, unary, stream)


def _wrap(
    handler: _Handler, unary: Callable[[_Behaviour], _Behaviour], stream: Callable[[_Behaviour], _Behaviour]
) -> _Handler:
    name = (
        ("stream" if handler.request_streaming else "unary")
        + "_"
        + ("stream" if handler.response_streaming else "unary")
    )
    behaviour = cast(_Behaviour, getattr(handler, name))
    # grpc's own health Watch has another signature, occupies no worker thread and raises no `OutriderError`.
    if getattr(behaviour, "experimental_non_blocking", False):
        return handler
    make = cast(Callable[..., _Handler], getattr(grpc, f"{name}_rpc_method_handler"))
    guarded = (stream if handler.response_streaming else unary)(behaviour)
    return make(
        guarded,
        request_deserializer=_tolerant(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )


def _refusing(guard: Callable[[_Behaviour], _Behaviour], error: OutriderError) -> _Handler:
    """Return a handler that fails every call with the error of an inner interceptor.

    The handler reads no request, so it can replace handlers of unary and streaming methods.
    """

    def refuse(_request: Any, _context: Any) -> Any:
        raise error

    return grpc.stream_stream_rpc_method_handler(guard(refuse))


def _tolerant(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return parse


def _checked(request: Any) -> Any:
    if isinstance(request, _Malformed):
        raise InvalidRequestError(
            "The request message does not parse as this method's protobuf type.", reason="malformed_message"
        )
    return request


def _checked_requests(request: Any) -> Any:
    """Check a single request now, or each request of a sync or asyncio stream when it arrives."""
    if hasattr(request, "__anext__"):
        return _checked_async(request)
    return map(_checked, request) if hasattr(request, "__next__") else _checked(request)


async def _checked_async(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _abort(context: grpc.ServicerContext, error: Exception) -> None:
    # If a status is already set, this exception comes from context.abort itself.
    if cast(Any, context).code() is not None:
        raise error
    context.abort_with_status(rpc_status.to_status(error_to_status(as_outrider_error(error))))


async def _abort_aio(context: grpc.aio.ServicerContext[Any, Any], error: Exception, note: _Note) -> None:
    failure = as_outrider_error(error)
    note(failure)
    status = error_to_status(failure)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    await context.abort(code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))


def _guard_unary(behaviour: _Behaviour) -> _Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behaviour(_checked_requests(request), context)
        except Exception as error:
            return _abort(context, error)

    return call


def _guard_stream(behaviour: _Behaviour) -> _Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behaviour(_checked_requests(request), context)
        except Exception as error:
            _abort(context, error)

    return call


def _guard_aio_unary(note: _Note, behaviour: _Behaviour) -> _Behaviour:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(_checked_requests(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            return await _abort_aio(context, error, note)

    return call


def _guard_aio_stream(note: _Note, behaviour: _Behaviour) -> _Behaviour:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            replies = behaviour(_checked_requests(request), context)
            # The asyncio stack also allows coroutines that write through the context. grpc's health servicer
            # is one.
            if isinstance(replies, Awaitable):
                await replies
                return
            async for reply in replies:
                yield reply
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort_aio(context, error, note)

    return call
