"""An echo server for `ClientStream` and `ServerStream`, and two threads that read from one stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc

from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.direct import ClientStream, StreamEndedError
from outrider.shared.rpc.direct_server import ServerStream
from outrider.shared.rpc.polling import PollWindow

METHOD = "/test.Echo/Stream"
WAIT_S = 10.0


class Echo(grpc.GenericRpcHandler):
    """Echoes the first message of a stream. Passes later messages, with the stream, to `on_message`."""

    def __init__(self, on_message: Callable[[ServerStream, bytes], None], max_unsent: int = 100) -> None:
        self.ended: SimpleQueue[Exception | None] = SimpleQueue()
        self._on_message = on_message
        self._max_unsent = max_unsent

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.stream_stream_rpc_method_handler(self._serve)

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        endings: SimpleQueue[Exception | None] = SimpleQueue()
        yield next(requests)
        stream = ServerStream(
            context,
            lambda message: self._on_message(stream, message),
            endings.put,
            self._max_unsent,
            PollWindow(),
        )
        stream.start()
        error = endings.get()
        stream.flush()
        self.ended.put(error)
        if error is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


class EchoServers:
    """Servers in this process, and one stream to each server."""

    def __init__(self) -> None:
        self._servers: list[grpc.Server] = []
        self._channels: list[grpc.Channel] = []
        self._streams: list[ClientStream] = []

    def start(self, echo: Echo) -> ClientStream:
        """Serve `echo` and return a stream on which the first message has been echoed."""
        server = grpc.server(ThreadPoolExecutor(4), handlers=[echo])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        channel = open_channel(f"127.0.0.1:{port}")
        stream = ClientStream(channel, METHOD, PollWindow())
        self._servers.append(server)
        self._channels.append(channel)
        self._streams.append(stream)
        stream.send(b"first")
        assert stream.receive() == b"first"
        return stream

    def stop(self) -> None:
        """End all streams, and then stop the servers."""
        for stream in self._streams:
            stream.cancel()
            stream.drain()
        for channel in self._channels:
            channel.close()
        for server in self._servers:
            server.stop(0).wait()


Serve = Callable[[Echo], ClientStream]


class Reader:
    """A thread that blocks in `receive`."""

    def __init__(self, stream: ClientStream) -> None:
        self.got: SimpleQueue[bytes] = SimpleQueue()
        self._stream = stream
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            while (message := self._stream.receive()) is not None:
                self.got.put(message)
        except StreamEndedError:
            pass


def exchange(stream: ClientStream, reader: Reader, message: bytes, pause_s: float = 0.0) -> bool:
    """Send a message that is echoed. Return True if this thread receives it, False if the reader does."""
    stream.send(message)
    if pause_s:
        reader.thread.join(pause_s)
    return receive(stream, reader, message)


def receive(stream: ClientStream, reader: Reader, message: bytes) -> bool:
    """Wait for a message. Return True if this thread receives the message, False if the reader does."""
    while True:
        if not reader.got.empty():
            assert reader.got.get() == message
            return False
        received = stream.receive_within(WAIT_S)
        if received is not None:
            assert received == message
            return True


SERVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
server = grpc.server(ThreadPoolExecutor(2), handlers=[Echo()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
server.wait_for_termination()
"""
