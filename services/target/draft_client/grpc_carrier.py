"""The streams to a draft over gRPC. Whoever sends on the session stream does it; the link's thread receives, for the engine thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import grpc
from google.protobuf.message import DecodeError

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.target.draft_client.connection import CONNECT_TIMEOUT_S, HANDSHAKE_TIMEOUT_S, ConnectionLost
from outrider.services.target.draft_client.rounds_channel import RoundsChannel
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.client import connect
from outrider.shared.rpc.direct import ClientStream
from outrider.shared.rpc.interceptors import error_from_rpc
from outrider.shared.rpc.tensors import InlineTensors, TensorWriter

REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
SESSION_METHOD = "/outrider.draft.v1.Draft/Session"
JOIN_S = 5.0


@contextlib.contextmanager
def lost() -> Iterator[None]:
    """Turn errors of gRPC into ours: a status that says no, or a connection that is lost."""
    try:
        yield
    except grpc.FutureTimeoutError:
        raise ConnectionLost("not there") from None
    except grpc.RpcError as error:
        if cast(grpc.Call, error).code() in REFUSALS:
            raise error_from_rpc(error) from None
        raise ConnectionLost(str(error)) from None


class WeightCalls:
    """The calls that exchange weights, which are gRPC on every transport."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = draft_pb2_grpc.DraftStub(channel)

    def get_tensor(self, name: str) -> Iterable[common_pb2.TensorChunk]:
        """See `Carrier.get_tensor`."""
        with lost():
            for reply in self._stub.GetTensor(draft_pb2.GetTensorRequest(name=name), timeout=HANDSHAKE_TIMEOUT_S):
                yield reply.chunk

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        """See `Carrier.put_tensors`."""
        with lost():
            requests = (draft_pb2.PutTensorRequest(chunk=chunk) for chunk in chunks)
            return self._stub.PutTensor(requests, timeout=HANDSHAKE_TIMEOUT_S)


class GrpcCarrier:
    """`Carrier` over two channels, so that a commit never queues behind rows of a prompt."""

    def __init__(self, address: str) -> None:
        self.ended = threading.Event()
        self.tensors: TensorWriter = InlineTensors()
        self.bulk_tensors: TensorWriter = self.tensors
        self.rounds: RoundsChannel | None = None
        self._channel, self._bulk_channel = connect(address), connect(address)
        weights = WeightCalls(self._channel)
        self.get_tensor, self.put_tensors = weights.get_tensor, weights.put_tensors
        self._bulk_outbox: queue.SimpleQueue[draft_pb2.BulkRequest | None] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[draft_pb2.SessionReply | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stream: ClientStream | None = None
        self._bulk_call: grpc.Call | None = None
        self._bulk_reader = threading.Thread(target=self._read_bulk, name="draft-bulk", daemon=True)
        self.send_bulk = self._bulk_outbox.put

    def hello(self, hello: draft_pb2.Hello) -> draft_pb2.HelloAck:
        """See `Carrier.hello`."""
        with lost():
            grpc.channel_ready_future(self._channel).result(CONNECT_TIMEOUT_S)
            stream = ClientStream(self._channel, SESSION_METHOD)
            with self._lock:
                self._stream = stream
            if self.ended.is_set():
                stream.cancel()
            self.send(draft_pb2.SessionRequest(hello=hello))
            watchdog = threading.Timer(HANDSHAKE_TIMEOUT_S, self.close)
            watchdog.daemon = True
            watchdog.start()
            try:
                reply = self._next(stream)
            finally:
                watchdog.cancel()
        if reply is None:
            raise ConnectionLost("the stream ended before HelloAck")
        if not reply.HasField("hello"):
            raise ProtocolError("the draft answered Hello with something else", field="hello")
        return reply.hello

    def open_bulk(self, target_id: str) -> None:
        """See `Carrier.open_bulk`."""
        call = draft_pb2_grpc.DraftStub(self._bulk_channel).Bulk(iter(self._bulk_outbox.get, None))
        with self._lock:
            self._bulk_call = call
        if self.ended.is_set():
            call.cancel()
        self._bulk_replies = call
        self._bulk_reader.start()

    def follow(self, on_pong: Callable[[draft_pb2.Pong], None]) -> None:
        """See `Carrier.follow`."""
        assert self._stream is not None, "hello() comes first"
        with lost():
            while (reply := self._next(self._stream)) is not None:
                if reply.HasField("pong"):
                    on_pong(reply.pong)
                else:
                    self._inbox.put(reply)

    def send(self, message: draft_pb2.SessionRequest) -> None:
        """See `Carrier.send`."""
        if self._stream is not None:
            self._stream.send(message.SerializeToString())

    def ping(self, message: draft_pb2.SessionRequest) -> None:
        """See `Carrier.ping`."""
        self.send(message)

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        """See `Carrier.receive`."""
        try:
            return self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """See `Carrier.close`."""
        self.ended.set()
        self._bulk_outbox.put(None)
        self._inbox.put(None)  # whoever waits in `receive`
        with self._lock:
            stream, bulk = self._stream, self._bulk_call
        if stream is not None:
            stream.cancel()
        if bulk is not None:
            bulk.cancel()

    def release(self) -> None:
        """See `Carrier.release`."""
        if self._stream is not None:
            self._stream.drain()
        if self._bulk_reader.is_alive():
            self._bulk_reader.join(JOIN_S)
        self._channel.close()
        self._bulk_channel.close()

    @staticmethod
    def _next(stream: ClientStream) -> draft_pb2.SessionReply | None:
        message = stream.receive()
        if message is None:
            return None
        try:
            return draft_pb2.SessionReply.FromString(message)
        except DecodeError:
            raise ProtocolError("a message of the draft does not parse", field="message") from None

    def _read_bulk(self) -> None:
        """Drain the acknowledgements; a bulk stream that ends takes the connection with it."""
        with contextlib.suppress(grpc.RpcError):
            for _ in self._bulk_replies:
                pass
        self.close()
