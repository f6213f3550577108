"""The streams to a draft over gRPC. Whoever sends on the session stream does it; the link's thread receives, for the engine thread."""

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
    ConnectionLost,
)
from outrider.services.target.draft_client.transport.rounds_channel import RoundsChannel
from outrider.services.target.draft_client.transport.rows_outbox import parts_of
from outrider.services.target.draft_client.transport.stream_rounds import StreamRounds
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.client import connect
from outrider.shared.rpc.direct import ClientStream
from outrider.shared.rpc.interceptors import error_from_rpc
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.polling import PollWindow
from outrider.shared.rpc.relay import StreamRelay
from outrider.shared.rpc.tensors import MAX_CHUNK_BYTES, InlineTensors, TensorWriter, fill_tensor, on_host

REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
SESSION_METHOD = "/outrider.draft.v1.Draft/Session"
BULK_METHOD = "/outrider.draft.v1.Draft/Bulk"
JOIN_S = 5.0
MAX_SHORT_BYTES = 4 * 1024 * 1024
"""Rows of a prompt that go on the session stream: what a commit of another sequence may have to queue behind."""
LOOK_S = 1.0
"""How often it is looked whether a bulk stream without traffic has ended."""
AWAKE_S = 0.05
"""So long is a reply waited for awake; from then on asleep."""
BEFORE_A_PAUSE = frozenset(("open", "close", "rounds_leave"))
"""Messages whose answer, if there is one, the engine thread does not wait for at once."""
CPU = torch.device("cpu")

log = get_logger("outrider.target.draft")


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
            for reply in self._stub.GetTensor(
                draft_pb2.GetTensorRequest(name=name), timeout=HANDSHAKE_TIMEOUT_S
            ):
                yield reply.chunk

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        """See `Carrier.put_tensors`."""
        with lost():
            requests = (draft_pb2.PutTensorRequest(chunk=chunk) for chunk in chunks)
            return self._stub.PutTensor(requests, timeout=LEND_TIMEOUT_S)


class GrpcCarrier:
    """`Carrier` over two channels, so that a commit never queues behind rows of a long prompt.

    Args:
        address: Of the draft.
        rounds: Offer rounds that stay on the device.
        device: Of the target.
    """

    rows_follow_open = False

    def __init__(self, address: str, *, rounds: bool = False, device: torch.device = CPU) -> None:
        self.ended = threading.Event()
        self.tensors: TensorWriter = InlineTensors()
        self.rounds: RoundsChannel | None = None
        self._channel, self._bulk_channel = connect(address), connect(address)
        weights = WeightCalls(self._channel)
        self.get_tensor, self.put_tensors = weights.get_tensor, weights.put_tensors
        self._inbox: queue.SimpleQueue[draft_pb2.SessionReply | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._streams: list[ClientStream] = []
        self._poll_window = PollWindow()
        self._stream: ClientStream | None = None
        self._bulk: ClientStream | None = None
        self._stream_rounds: StreamRounds | None = None
        self._offers_rounds = rounds
        self._device = device
        self._on_pong: Callable[[draft_pb2.Pong], None] = _unheard
        # Chunks of rows that have not been answered; and how many were sent and answered.
        self._owed = threading.Semaphore(0)
        self._bulk_sent = self._bulk_answered = 0
        self._bulk_reader = threading.Thread(target=self._read_bulk, name="draft-bulk", daemon=True)

    @property
    def rows_behind(self) -> bool:
        """See `Carrier`: those of the bulk stream."""
        return self._bulk_sent != self._bulk_answered

    def hello(self, hello: draft_pb2.Hello) -> draft_pb2.HelloAck:
        """See `Carrier.hello`."""
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
            raise ProtocolError("the draft answered Hello with something else", field="hello")
        return ack.hello

    def open_bulk(self, target_id: str) -> None:
        """See `Carrier.open_bulk`."""
        assert self._stream is not None, "hello() comes first"
        self._bulk = self._own(
            ClientStream(self._bulk_channel, BULK_METHOD, PollWindow(enabled=self._poll_window.enabled))
        )
        self._bulk_reader.start()
        if self._offers_rounds:
            self._stream_rounds = StreamRounds(
                self._stream,
                self._poll_window,
                self._dispatch,
                StreamRelay.try_make(Side.TARGET, self._device),
            )
            self.rounds = self._stream_rounds

    def follow(self, on_pong: Callable[[draft_pb2.Pong], None]) -> None:
        """See `Carrier.follow`."""
        assert self._stream is not None, "hello() comes first"
        self._on_pong = on_pong
        with lost():
            while (message := self._stream.receive()) is not None:
                self._dispatch(message)

    def send(self, message: draft_pb2.SessionRequest) -> None:
        """See `Carrier.send`."""
        if self._stream is not None:
            self._stream.send(message.SerializeToString())
            if message.WhichOneof("message") in BEFORE_A_PAUSE:
                self._stream.give_back()

    def send_rows(self, message: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        """See `Carrier.send_rows`: on the bulk stream, but for short prompts, which decoding waits for."""
        if self._stream is None or self._bulk is None:
            return
        short = rows.nbytes <= MAX_SHORT_BYTES
        for part, some in parts_of(message, on_host(rows), MAX_CHUNK_BYTES):
            request = draft_pb2.SessionRequest(rows=part)
            fill_tensor(request.rows.features, some)
            if short:
                self._stream.send(request.SerializeToString())
            else:
                self._bulk.send(request.rows.SerializeToString())
                self._bulk_sent += 1
                self._owed.release()

    def ping(self, message: draft_pb2.SessionRequest) -> None:
        """See `Carrier.ping`."""
        self.send(message)

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        """See `Carrier.receive`. Where waits are awake, and after rounds on the device, the engine thread reads the stream itself."""
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
        """See `Carrier.close`."""
        self.ended.set()
        if self.rounds is not None:
            self.rounds.close()
        self._inbox.put(None)  # whoever waits in `receive`
        self._owed.release()
        with self._lock:
            for stream in self._streams:
                stream.cancel()

    def release(self) -> None:
        """See `Carrier.release`."""
        if self._stream is not None:
            self._stream.drain()
        if self._bulk_reader.is_alive():
            self._bulk_reader.join(JOIN_S)
        self._on_pong = _unheard  # it knows the connection, which has this
        self._channel.close()
        self._bulk_channel.close()

    def _own(self, stream: ClientStream) -> ClientStream:
        """Cancel `stream` when the connection closes."""
        with self._lock:
            self._streams.append(stream)
            if self.ended.is_set():
                stream.cancel()
        return stream

    def _dispatch(self, message: bytes) -> None:
        """Hand a message on; on the link's thread, or on the engine's."""
        reply = _parse(message)
        if reply.HasField("round_trees") and self._stream_rounds is not None:
            self._stream_rounds.arrived(reply.round_trees)
        elif reply.HasField("pong"):
            self._on_pong(reply.pong)
        elif not reply.HasField("round_taken"):  # which the way back was warmed by
            self._inbox.put(reply)

    def _read(self, stream: ClientStream, timeout_s: float) -> None:
        """Wait until there is a reply in the inbox, or the stream has ended."""
        until = time.monotonic() + timeout_s
        self._poll_window.expect(min(timeout_s, AWAKE_S))
        while self._inbox.empty() and not stream.ended and (remaining := until - time.monotonic()) > 0:
            message = stream.receive_within(min(remaining, AWAKE_S))
            if message is not None:
                self._take_in(message)
        self._poll_window.rest()

    def _take_in(self, message: bytes) -> None:
        """Hand a message on; on the engine's thread, where a malformed one ends the stream."""
        try:
            self._dispatch(message)
        except ProtocolError as error:
            log.warning("the draft broke the protocol", error=error.message)
            self.close()

    def _read_bulk(self) -> None:
        """Drain the acknowledgements; a bulk stream that ends takes the connection with it.

        While none is due this thread stays out of gRPC's core: among threads that wait there only one watches the sockets, for all.
        """
        assert self._bulk is not None
        with contextlib.suppress(grpc.RpcError):
            while not self._bulk.ended:
                if not self._owed.acquire(timeout=LOOK_S):
                    self._bulk.look()
                elif self._bulk.receive() is None:
                    break
                else:
                    self._bulk_answered += 1
        self.close()
        self._bulk.drain()


def _unheard(_pong: draft_pb2.Pong) -> None:
    """A sign of life that nobody listens for."""


def _parse(message: bytes) -> draft_pb2.SessionReply:
    try:
        return draft_pb2.SessionReply.FromString(message)
    except DecodeError:
        raise ProtocolError("a message of the draft does not parse", field="message") from None
