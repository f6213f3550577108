"""Errors over gRPC: callers receive the servicer's error unchanged, in sync and asyncio, on all calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from outrider.common.v1 import common_pb2
from outrider.shared.base.errors import ErrorCode, InvalidRequestError, OutriderError, OverloadedError
from outrider.shared.rpc.client import connect_aio, open_channel
from outrider.shared.rpc.common_messages import STATUS_OF_CODE, error_from_proto, error_to_proto
from outrider.shared.rpc.interceptors import error_from_rpc
from outrider.shared.rpc.server import aio_server, sync_server
from outrider.target.v1 import target_pb2, target_pb2_grpc

ADD = target_pb2_grpc.add_TargetServicer_to_server
NAME = "outrider.target.v1.Target"


class SyncTarget(target_pb2_grpc.TargetServicer):
    """Raises the given error from a unary call, before a stream's first reply, and after it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def GetInfo(self, request, context):
        raise self.error

    def Generate(self, request, context) -> Iterator[target_pb2.GenerateReply]:
        yield target_pb2.GenerateReply(request_id=request.request_id)
        raise self.error

    def Session(self, request_iterator, context) -> Iterator[target_pb2.SessionReply]:
        for request in request_iterator:
            yield target_pb2.SessionReply(
                replies=[target_pb2.GenerateReply(request_id=request.generate.request_id)]
            )

    def GetStats(self, request, context):
        context.abort(grpc.StatusCode.ABORTED, "aborted by hand")

    def GetTensor(self, request, context):
        raise self.error


class AioTarget(target_pb2_grpc.TargetServicer):
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def GetInfo(self, request, context):
        raise self.error

    async def Generate(self, request, context) -> AsyncIterator[target_pb2.GenerateReply]:
        yield target_pb2.GenerateReply(request_id=request.request_id)
        raise self.error

    async def Session(self, request_iterator, context) -> AsyncIterator[target_pb2.SessionReply]:
        async for request in request_iterator:
            yield target_pb2.SessionReply(
                replies=[target_pb2.GenerateReply(request_id=request.generate.request_id)]
            )

    async def GetStats(self, request, context):
        await context.abort(grpc.StatusCode.ABORTED, "aborted by hand")

    def GetTensor(self, request, context):
        raise self.error


def same(got: OutriderError, sent: OutriderError) -> bool:
    return (got.message, got.code, got.reason, got.field, got.retry_after_s) == (
        sent.message,
        sent.code,
        sent.reason,
        sent.field,
        sent.retry_after_s,
    )


def every_error() -> list[OutriderError]:
    return [
        OutriderError(f"message of {code.name}", code=code, reason=code.name.lower()) for code in ErrorCode
    ] + [
        InvalidRequestError("max_tokens must be positive", field="max_tokens"),
        OverloadedError("the queue is full", retry_after_s=1.5),
    ]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.reason)
def test_a_domain_error_crosses_a_synchronous_call_unchanged(error: OutriderError) -> None:
    server = sync_server("127.0.0.1:0", [(ADD, SyncTarget(error))], [NAME], max_workers=2)
    server.start()
    try:
        with open_channel(server.address) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.GetInfo(target_pb2.GetInfoRequest(), timeout=10)
            # The channel retries UNAVAILABLE; the final error is the same.
            assert caught.value.code() is STATUS_OF_CODE[error.code]
            assert same(error_from_rpc(caught.value), error)

            replies = stub.Generate(target_pb2.GenerateRequest(request_id="a"), timeout=10)
            assert next(replies).request_id == "a"
            with pytest.raises(grpc.RpcError) as caught:
                next(replies)
            assert same(error_from_rpc(caught.value), error)
    finally:
        server.stop(0)


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.reason)
async def test_a_domain_error_crosses_an_asyncio_call_unchanged(error: OutriderError) -> None:
    server = aio_server("127.0.0.1:0", [(ADD, AioTarget(error))], [NAME])
    await server.start()
    try:
        async with connect_aio(server.address) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=10)
            assert caught.value.code() is STATUS_OF_CODE[error.code]
            assert same(error_from_rpc(caught.value), error)

            replies = stub.Generate(target_pb2.GenerateRequest(request_id="a"), timeout=10)
            assert (await replies.read()).request_id == "a"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await replies.read()
            assert same(error_from_rpc(caught.value), error)
    finally:
        await server.stop(0)


def test_an_unknown_exception_is_internal_and_reveals_nothing() -> None:
    server = sync_server(
        "127.0.0.1:0", [(ADD, SyncTarget(RuntimeError("secret path")))], [NAME], max_workers=2
    )
    server.start()
    try:
        with open_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
            target_pb2_grpc.TargetStub(channel).GetInfo(target_pb2.GetInfoRequest(), timeout=10)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (caught.value.details() or "")
    finally:
        server.stop(0)


def test_context_abort_keeps_its_own_status() -> None:
    server = sync_server("127.0.0.1:0", [(ADD, SyncTarget(RuntimeError()))], [NAME], max_workers=2)
    server.start()
    try:
        with open_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
            target_pb2_grpc.TargetStub(channel).GetStats(target_pb2.GetStatsRequest(), timeout=10)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "aborted by hand")
    finally:
        server.stop(0)


async def test_context_abort_keeps_its_own_status_on_asyncio() -> None:
    server = aio_server("127.0.0.1:0", [(ADD, AioTarget(RuntimeError()))], [NAME])
    await server.start()
    try:
        async with connect_aio(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await target_pb2_grpc.TargetStub(channel).GetStats(target_pb2.GetStatsRequest(), timeout=10)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "aborted by hand")
    finally:
        await server.stop(0)


GARBAGE = b"\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("method", "kind"),
    [("GetInfo", "unary_unary"), ("Generate", "unary_stream"), ("Session", "stream_stream")],
)
async def test_bytes_that_do_not_parse_are_the_callers_fault_on_both_stacks(method: str, kind: str) -> None:
    threaded = sync_server("127.0.0.1:0", [(ADD, SyncTarget(RuntimeError()))], [NAME], max_workers=2)
    threaded.start()
    looped = aio_server("127.0.0.1:0", [(ADD, AioTarget(RuntimeError()))], [NAME])
    await looped.start()
    try:
        for address in (threaded.address, looped.address):
            async with connect_aio(address) as channel:
                call = getattr(channel, kind)(f"/{NAME}/{method}")
                request = iter([GARBAGE]) if kind.startswith("stream") else GARBAGE
                pending = call(request, timeout=10)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await (pending if kind == "unary_unary" else pending.read())
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert error_from_rpc(caught.value).reason == "malformed_message"
    finally:
        await looped.stop(0)
        threaded.stop(0)


@pytest.mark.parametrize("error", every_error(), ids=lambda error: error.reason)
def test_an_error_inside_a_stream_round_trips_unchanged(error: OutriderError) -> None:
    assert same(
        error_from_proto(common_pb2.ErrorDetail.FromString(error_to_proto(error).SerializeToString())), error
    )


def test_an_unknown_status_of_a_newer_peer_counts_as_internal() -> None:
    assert error_from_proto(common_pb2.ErrorDetail(status=418, message="teapot")).code is ErrorCode.INTERNAL


def test_an_error_without_our_details_is_mapped_by_its_grpc_status() -> None:
    # No server listens there, so the transport itself reports UNAVAILABLE.
    with open_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as caught:
        target_pb2_grpc.TargetStub(channel).GetInfo(target_pb2.GetInfoRequest(), timeout=5)
    assert error_from_rpc(caught.value).code is ErrorCode.UNAVAILABLE


async def test_an_inner_interceptors_error_refuses_calls_of_every_kind() -> None:
    error = OutriderError("no key", code=ErrorCode.UNAUTHENTICATED, reason="invalid_api_key")

    class Refusing(grpc.ServerInterceptor):
        def intercept_service(self, continuation, handler_call_details):
            raise error

    class AioRefusing(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, handler_call_details):
            raise error

    threaded = sync_server(
        "127.0.0.1:0", [(ADD, SyncTarget(error))], [NAME], max_workers=2, interceptors=[Refusing()]
    )
    threaded.start()
    looped = aio_server("127.0.0.1:0", [(ADD, AioTarget(error))], [NAME], interceptors=[AioRefusing()])
    await looped.start()
    try:
        for address in (threaded.address, looped.address):
            async with connect_aio(address) as channel:
                stub = target_pb2_grpc.TargetStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=10)
                assert same(error_from_rpc(caught.value), error)
                for call in (
                    stub.Generate(target_pb2.GenerateRequest(), timeout=10),
                    stub.Session(timeout=10),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call.read()
                    assert same(error_from_rpc(caught.value), error)
    finally:
        await looped.stop(0)
        threaded.stop(0)
