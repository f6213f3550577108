"""The shared token of the services: checks it in servers, and adds it to calls on channels without TLS.

The token is sent in the metadata of a call. On channels with TLS, the channel's credentials add the token
(`peer_security`).
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, cast
from weakref import WeakKeyDictionary

import grpc

from outrider.shared.base.errors import ErrorCode, OutriderError
from outrider.shared.rpc.peer_security import TOKEN_KEY

HEALTH_PREFIX = "/grpc.health.v1.Health/"
Metadata = tuple[tuple[str, str], ...]
_metadata_of: WeakKeyDictionary[grpc.Channel, Metadata] = WeakKeyDictionary()


def check_token(token: str, details: grpc.HandlerCallDetails) -> None:
    """Check the token of a gRPC call in constant time. Health checks need no token.

    Raises:
        OutriderError: The token is missing or wrong. The code is UNAUTHENTICATED.
    """
    if str(details.method).startswith(HEALTH_PREFIX):
        return
    given = dict(details.invocation_metadata or ()).get(TOKEN_KEY, "")
    if not hmac.compare_digest(str(given).encode("utf-8", "surrogateescape"), token.encode()):
        raise OutriderError(
            "This service requires the token that all services share. Set --peer-token-file on both sides.",
            code=ErrorCode.UNAUTHENTICATED,
            reason="invalid_peer_token",
        )


class TokenCheck(grpc.ServerInterceptor):
    """Interceptor of `grpc.server` that requires the token in every call."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Any],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        check_token(self._token, handler_call_details)
        return continuation(handler_call_details)


class AioTokenCheck(grpc.aio.ServerInterceptor):
    """Interceptor of `grpc.aio.server` that requires the token in every call."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        check_token(self._token, handler_call_details)
        return await continuation(handler_call_details)


def with_token(channel: grpc.Channel, metadata: Metadata) -> grpc.Channel:
    """Return a channel that adds `metadata` to every call."""
    wrapped = grpc.intercept_channel(channel, _AddToken(metadata))
    _metadata_of[wrapped] = metadata
    return wrapped


def inner_channel(channel: grpc.Channel) -> tuple[Any, Metadata | None]:
    """Return the channel below grpcio's public interface, and the metadata that its calls must have."""
    metadata = _metadata_of.get(channel)
    inner = cast(Any, channel)._channel
    return (inner, None) if metadata is None else (inner._channel, metadata)


def aio_interceptors(metadata: Metadata) -> list[grpc.aio.ClientInterceptor]:
    """Return the interceptors that add `metadata` to every call of an asyncio channel."""
    # grpcio sorts interceptors by their first matching base class, so each kind of call needs its own class.
    return [kind(metadata) for kind in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)]


class _AddToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(_Details(client_call_details, self._metadata), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(_Details(client_call_details, self._metadata), request)

    def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(_Details(client_call_details, self._metadata), request_iterator)

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return continuation(_Details(client_call_details, self._metadata), request_iterator)


class _Details(grpc.ClientCallDetails):
    """The details of a call, with more metadata."""

    def __init__(self, details: Any, metadata: Metadata) -> None:
        self.method, self.timeout = details.method, details.timeout
        self.metadata = (*(details.metadata or ()), *metadata)
        self.credentials = details.credentials
        self.wait_for_ready, self.compression = details.wait_for_ready, details.compression


class _AioAddToken:
    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    async def _call(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._metadata)
        return await continuation(details._replace(metadata=metadata), request)


class _UnaryUnary(_AioAddToken, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request)


class _UnaryStream(_AioAddToken, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._call(continuation, client_call_details, request)


class _StreamUnary(_AioAddToken, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await self._call(continuation, client_call_details, request_iterator)


class _StreamStream(_AioAddToken, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await self._call(continuation, client_call_details, request_iterator)
