"""Carries the draft protocol over gRPC: a session stream, a bulk stream for long prompts, weight transfers.

Any thread may send on the session stream. Usually, a separate thread receives the draft's replies on this
stream and passes them to the engine thread. On hosts where waits busy-poll (see `shared.rpc.polling`), the
engine thread receives the replies itself.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import grpc
import torch
from google.protobuf.message import DecodeError

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.target.draft_client.transport.carrier import (
    CONNECT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    LEND_TIMEOUT_S,
    Carrier,
    ConnectionLost,
)
from outrider.services.target.draft_client.transport.exchange import Exchange
from outrider.services.target.draft_client.transport.rows_outbox import split_feature_rows
from outrider.services.target.draft_client.transport.stream_exchange import StreamExchange
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.direct import ClientStream
from outrider.shared.rpc.interceptors import error_from_rpc
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.polling import PollWindow
from outrider.shared.rpc.relay import StreamRelay
from outrider.shared.rpc.tensors import MAX_CHUNK_BYTES, InlineTensors, TensorWriter, fill_tensor, on_host
from outrider.shared.rpc.version import Feature

REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
SESSION_METHOD = "/outrider.draft.v1.Draft/Session"
BULK_METHOD = "/outrider.draft.v1.Draft/Bulk"
JOIN_S = 5.0
MAX_SHORT_BYTES = 4 * 1024 * 1024
"""Largest size, in bytes, of prompt rows that are sent on the session stream. A commit of another sequence
may queue behind such rows."""
LOOK_S = 1.0
"""Poll interval for the end of an idle bulk stream."""
AWAKE_S = 0.05
"""Longest busy-poll for a reply; after that the thread sleeps."""
BEFORE_A_PAUSE = frozenset(("open", "close", "slots_update"))
"""Kinds of messages after which the engine thread does not wait for an answer immediately."""
CPU = torch.device("cpu")

log = get_logger("outrider.target.draft")


@contextlib.contextmanager
def lost() -> Iterator[None]:
    """Convert a gRPC error. A refusal becomes an `OutriderError`, and any other error a `ConnectionLost`."""
    try:
        yield
    except grpc.FutureTimeoutError:
        raise ConnectionLost("the draft cannot be reached") from None
    except grpc.RpcError as error:
        if cast(grpc.Call, error).code() in REFUSALS:
            raise error_from_rpc(error) from None
        raise ConnectionLost(_status_of(error)) from None


def _status_of(error: grpc.RpcError) -> str:
    call = cast(grpc.Call, error)
    return f"{call.code().name}: {call.details()}"


class WeightCalls:
    """Exchanges weights with a draft. Every transport uses gRPC for these calls."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = draft_pb2_grpc.DraftStub(channel)

    def get_tensor(self, name: str) -> Iterable[common_pb2.TensorChunk]:
        """Yield the chunks of one of the draft's tensors."""
        with lost():
            for reply in self._stub.GetTensor(
                draft_pb2.GetTensorRequest(name=name), timeout=HANDSHAKE_TIMEOUT_S
            ):
                yield reply.chunk

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        """Send tensors that the draft borrows."""
        with lost():
            requests = (draft_pb2.PutTensorRequest(chunk=chunk) for chunk in chunks)
            return self._stub.PutTensor(requests, timeout=LEND_TIMEOUT_S)


class GrpcCarrier(Carrier):
    """Carries the messages of the draft protocol over two gRPC channels.

    Commits and the feature rows of long prompts use different channels, so that commits do not queue behind
    these feature rows.

    Args:
        address: The draft service's address.
        on_device: True to offer rounds whose states and trees stay on the devices.
        device: The target's device.
    """

    rows_follow_open = False

    def __init__(self, address: str, *, on_device: bool = False, device: torch.device = CPU) -> None:
        self.ended = threading.Event()
        self.tensors: TensorWriter = InlineTensors()
        self.exchange: Exchange | None = None
        self._channel, self._bulk_channel = open_channel(address), open_channel(address)
        self._weights = WeightCalls(self._channel)
        self._inbox: queue.SimpleQueue[draft_pb2.SessionReply | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._streams: list[ClientStream] = []
        self._poll_window = PollWindow()
        self._stream: ClientStream | None = None
        self._bulk: ClientStream | None = None
        self._stream_exchange: StreamExchange | None = None
        self._on_device = on_device
        self._device = device
        self._on_pong: Callable[[draft_pb2.Pong], None] = _unheard
        # Released once for each chunk that is sent on the bulk stream.
        self._owed = threading.Semaphore(0)
        self._bulk_reader = threading.Thread(target=self._read_bulk, name="draft-bulk", daemon=True)

    def hello(self, hello: draft_pb2.Hello) -> draft_pb2.HelloAck:
        with lost():
            grpc.channel_ready_future(self._channel).result(CONNECT_TIMEOUT_S)
            stream = self._stream = self._own(ClientStream(self._channel, SESSION_METHOD, self._poll_window))
            self.send(draft_pb2.SessionRequest(hello=hello))
            watchdog = threading.Timer(HANDSHAKE_TIMEOUT_S, self.close)
            watchdog.daemon = True
            watchdog.start()
            try:
                reply = stream.receive()
            finally:
                watchdog.cancel()
        if reply is None:
            raise ConnectionLost("the stream ended before HelloAck")
        ack = _parse(reply)
        if not ack.HasField("hello"):
            raise ProtocolError("the draft did not answer Hello with HelloAck", field="hello")
        return ack.hello

    def get_tensor(self, name: str) -> Iterable[common_pb2.TensorChunk]:
        return self._weights.get_tensor(name)

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        return self._weights.put_tensors(chunks)

    def open_bulk(self, target_id: str, features: frozenset[Feature]) -> None:
        assert self._stream is not None, "hello() comes first"
        self._bulk = self._own(
            ClientStream(self._bulk_channel, BULK_METHOD, PollWindow(enabled=self._poll_window.enabled))
        )
        self._bulk_reader.start()
        if self._on_device and Feature.SLOTTED_ROUNDS in features:
            self._stream_exchange = StreamExchange(
                self._stream,
                self._poll_window,
                self._dispatch,
                StreamRelay.try_make(Side.TARGET, self._device),
                compact=Feature.COMPACT_STATES in features,
            )
            self.exchange = self._stream_exchange

    def follow(self, on_pong: Callable[[draft_pb2.Pong], None]) -> None:
        assert self._stream is not None, "hello() comes first"
        self._on_pong = on_pong
        with lost():
            while (message := self._stream.receive()) is not None:
                self._dispatch(message)

    def send(self, message: draft_pb2.SessionRequest) -> None:
        if self._stream is not None:
            self._stream.send(message.SerializeToString())
            if message.WhichOneof("message") in BEFORE_A_PAUSE:
                self._stream.give_back()

    def send_rows(self, message: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        """Send feature rows: a few rows on the session stream, and many rows on the bulk stream.

        The session stream is faster, so that a sequence with a short prompt can start to draft sooner.
        """
        if self._stream is None or self._bulk is None:
            return
        short = rows.nbytes <= MAX_SHORT_BYTES
        for part, some in split_feature_rows(message, on_host(rows), MAX_CHUNK_BYTES):
            request = draft_pb2.SessionRequest(rows=part)
            fill_tensor(request.rows.features, some)
            if short:
                self._stream.send(request.SerializeToString())
            else:
                self._bulk.send(request.rows.SerializeToString())
                self._owed.release()

    def ping(self, message: draft_pb2.SessionRequest) -> None:
        self.send(message)

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        """Return the next reply.

        The calling thread reads the stream itself on hosts where waits busy-poll, and after rounds on the
        device.
        """
        with contextlib.suppress(queue.Empty):
            return self._inbox.get_nowait()
        if self._stream is not None:
            for message in self._stream.poll():
                self._take_in(message)
            if timeout_s and (self._poll_window.enabled or self._stream.taken):
                self._read(self._stream, timeout_s)
                timeout_s = 0.0
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
        return None

    def close(self) -> None:
        self.ended.set()
        if self.exchange is not None:
            self.exchange.close()
        self._inbox.put(None)  # wake a thread that waits in `receive`
        self._owed.release()
        with self._lock:
            for stream in self._streams:
                stream.cancel()

    def release(self) -> None:
        if self._stream is not None:
            self._stream.drain()
        if self._bulk_reader.is_alive():
            self._bulk_reader.join(JOIN_S)
        # Break a cycle: the callback references the connection, which owns this carrier.
        self._on_pong = _unheard
        self._channel.close()
        self._bulk_channel.close()

    def _own(self, stream: ClientStream) -> ClientStream:
        """Register a stream, so that it is cancelled when the connection closes."""
        with self._lock:
            self._streams.append(stream)
            if self.ended.is_set():
                stream.cancel()
        return stream

    def _dispatch(self, message: bytes) -> None:
        """Pass a message to its receiver. Runs on the link's thread or the engine thread."""
        reply = _parse(message)
        if reply.HasField("round_trees") and self._stream_exchange is not None:
            self._stream_exchange.arrived(reply.round_trees)
        elif reply.HasField("pong"):
            self._on_pong(reply.pong)
        elif not reply.HasField("round_taken"):  # RoundTaken only warms up the code that receives trees
            self._inbox.put(reply)

    def _read(self, stream: ClientStream, timeout_s: float) -> None:
        """Wait until the inbox contains a reply or the stream has ended."""
        until = time.monotonic() + timeout_s
        self._poll_window.expect(min(timeout_s, AWAKE_S))
        while self._inbox.empty() and not stream.ended and (remaining := until - time.monotonic()) > 0:
            message = stream.receive_within(min(remaining, AWAKE_S))
            if message is not None:
                self._take_in(message)
        self._poll_window.rest()

    def _take_in(self, message: bytes) -> None:
        """Dispatch a message on the engine thread. A malformed message ends the connection."""
        try:
            self._dispatch(message)
        except ProtocolError as error:
            log.warning("the draft violated the protocol", error=error.message)
            self.close()

    def _read_bulk(self) -> None:
        """Receive the acknowledgements of bulk chunks. The end of the bulk stream ends the connection.

        In gRPC's core, one waiting thread watches the sockets for all waiting threads. To leave this role to
        the engine thread, this thread waits in gRPC only while an acknowledgement is due.
        """
        assert self._bulk is not None
        try:
            while not self._bulk.ended:
                if not self._owed.acquire(timeout=LOOK_S):
                    self._bulk.look()
                elif self._bulk.receive() is None:
                    break
        except grpc.RpcError as error:
            if not self.ended.is_set():
                log.warning("the draft ended the stream of prompt rows", reason=_status_of(error))
        self.close()
        self._bulk.drain()


def _unheard(_pong: draft_pb2.Pong) -> None:
    """Ignore a pong that arrives before `follow` or after `release`."""


def _parse(message: bytes) -> draft_pb2.SessionReply:
    try:
        return draft_pb2.SessionReply.FromString(message)
    except DecodeError:
        raise ProtocolError("a message from the draft cannot be parsed", field="message") from None
