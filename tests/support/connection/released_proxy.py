"""A gRPC proxy that passes only what the previous release knows, so that either side seems to be older."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from outrider.shared.rpc.client import open_channel
from support.connection.released_wire import as_released, released_method

THREADS = 32
# A call without a deadline has more time left than this.
NO_DEADLINE_S = 1e6


def _same(data: bytes) -> bytes:
    return data


class ReleasedProxy(grpc.GenericRpcHandler):
    """Listens at one address and forwards all calls to a service at another one.

    Methods that the previous release does not have, such as those of the health service, are passed as they
    are.
    """

    def __init__(self, listen: str, upstream: str) -> None:
        self._channel = open_channel(upstream)
        self._server = grpc.server(ThreadPoolExecutor(THREADS))
        self._server.add_generic_rpc_handlers([self])
        self._server.add_insecure_port(listen)
        self.address = listen
        self._server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        path = handler_call_details.method
        method = released_method(path)
        reads, writes = _same, _same
        if method is not None:

            def reads(data: bytes) -> bytes:
                return as_released(data, method.input_type.full_name)

            def writes(data: bytes) -> bytes:
                return as_released(data, method.output_type.full_name)

        call = self._channel.stream_stream(path)

        def forward(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            left = context.time_remaining()
            timeout = left if left is not None and left < NO_DEADLINE_S else None
            replies = call((reads(one) for one in requests), timeout=timeout)
            context.add_callback(replies.cancel)
            try:
                for reply in replies:
                    yield writes(reply)
            except grpc.RpcError as error:
                context.set_trailing_metadata(replies.trailing_metadata() or ())
                _end(context, error)

        return grpc.stream_stream_rpc_method_handler(forward)

    def close(self) -> None:
        """Stop listening, and end all calls."""
        self._server.stop(0)
        self._channel.close()


def _end(context: grpc.ServicerContext, error: Any) -> None:
    context.set_code(error.code())
    context.set_details(error.details() or "")
