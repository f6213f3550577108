"""Carries the draft protocol on one host: messages over unix sockets, and tensors through mailboxes.

The tensors are feature rows, round states and trees. There are two unix sockets. The engine thread sends and
receives on the session socket. A separate thread receives pongs on the bulk socket, and detects the end of
the connection.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from google.protobuf.message import DecodeError

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.services.target.draft_client.transport.carrier import (
    CONNECT_TIMEOUT_S,
    HANDSHAKE_TIMEOUT_S,
    Carrier,
    ConnectionLost,
)
from outrider.services.target.draft_client.transport.exchange import Exchange
from outrider.services.target.draft_client.transport.grpc_carrier import WeightCalls
from outrider.services.target.draft_client.transport.rows_outbox import RowsOutbox
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.address import IpcAddress
from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.common_messages import error_from_proto
from outrider.shared.rpc.ipc.blob_mailbox import BlobMailbox
from outrider.shared.rpc.ipc.cuda import CudaError
from outrider.shared.rpc.ipc.frames import EndOfStream, FrameKind, FrameSocket
from outrider.shared.rpc.ipc.handshake import Offered, offers
from outrider.shared.rpc.ipc.sockets import connect
from outrider.shared.rpc.tensors import InlineTensors, TensorWriter
from outrider.shared.rpc.version import Feature
from outrider.shared.spec.resident import StateBlob

IDLE_S = 3600.0
PUMP_S = 5e-4
"""Poll interval for a free mailbox slot while rows wait."""

log = get_logger("outrider.target.draft")


class IpcCarrier(Carrier):
    """Carries the draft protocol on one host, over two unix sockets and mailboxes in shared memory.

    Args:
        address: The draft service's address.
        device: Device of the target's feature rows.
        on_device: True to offer rounds whose states and trees stay on the devices.
    """

    rows_follow_open = True

    def __init__(self, address: IpcAddress, device: torch.device, *, on_device: bool = False) -> None:
        self.ended = threading.Event()
        self.tensors: TensorWriter = InlineTensors()
        self.exchange: Exchange | None = None
        self._on_device = on_device
        self._address = address
        self._device = device
        self._channel = open_channel(address.grpc)
        self._weights = WeightCalls(self._channel)
        self._number = secrets.randbits(64)
        self._lock = threading.Lock()
        self._sockets: list[FrameSocket] = []
        self._rows: RowsOutbox | None = None

    def hello(self, hello: draft_pb2.Hello) -> draft_pb2.HelloAck:
        with _lost():
            self._session = self._connect()
            self._session.send(FrameKind.HELLO, hello.SerializeToString())
            return draft_pb2.HelloAck.FromString(_answer(self._session, FrameKind.HELLO))

    def get_tensor(self, name: str) -> Iterable[common_pb2.TensorChunk]:
        return self._weights.get_tensor(name)

    def put_tensors(self, chunks: Iterable[common_pb2.TensorChunk]) -> draft_pb2.PutTensorReply:
        return self._weights.put_tensors(chunks)

    def open_bulk(self, target_id: str, features: frozenset[Feature]) -> None:
        if Feature.MAILBOX not in features:
            raise ProtocolError(
                "The draft does not support mailboxes, which ipc needs: use a draft address for gRPC.",
                field="protocol_features",
            )
        with _lost():
            offered = self._agree(self._on_device and Feature.SLOTTED_ROUNDS in features)
            self.tensors, self._rows = offered.session, RowsOutbox(offered.bulk, self.send)
            self._bulk = self._connect()
            hello = draft_pb2.BulkHello(target_id=target_id, connection=self._number)
            self._bulk.send(FrameKind.BULK_HELLO, hello.SerializeToString())

    def follow(self, on_pong: Callable[[draft_pb2.Pong], None]) -> None:
        with _lost():
            while True:
                received = self._bulk.receive(IDLE_S)
                if received is not None:
                    on_pong(draft_pb2.SessionReply.FromString(_checked(received, FrameKind.SESSION)).pong)

    def send(self, message: draft_pb2.SessionRequest) -> None:
        try:
            self._session.send(FrameKind.SESSION, message.SerializeToString())
        except EndOfStream:
            self.close()

    def send_rows(self, message: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        outbox = self._rows  # a local copy, because the link's thread may clear the attribute meanwhile
        try:
            if outbox is not None:
                outbox.put(message, rows)
        except (EndOfStream, ProtocolError) as error:
            log.warning("disconnected from the draft", reason=str(error))
            self.close()

    def ping(self, message: draft_pb2.SessionRequest) -> None:
        """Send a ping over the bulk socket, because a thread of the draft always reads from that socket."""
        try:
            self._session.flush()
            self._bulk.send(FrameKind.SESSION, message.SerializeToString())
        except EndOfStream:
            self.close()

    def receive(self, timeout_s: float) -> draft_pb2.SessionReply | None:
        try:
            received = self._receive(timeout_s)
            return (
                None
                if received is None
                else draft_pb2.SessionReply.FromString(_checked(received, FrameKind.SESSION))
            )
        except EndOfStream:
            self.close()
        except (ProtocolError, DecodeError) as error:
            log.warning("the draft violated the protocol", error=str(error))
            self.close()
        return None

    def close(self) -> None:
        self.ended.set()
        if self.exchange is not None:
            self.exchange.close()
        with self._lock:
            sockets = list(self._sockets)
        for frames in sockets:
            frames.close()

    def release(self) -> None:
        self._rows = None  # frees the mailbox
        self._channel.close()

    def _connect(self) -> FrameSocket:
        frames = FrameSocket(connect(self._address.streams, CONNECT_TIMEOUT_S))
        with self._lock:
            self._sockets.append(frames)
        if self.ended.is_set():
            frames.close()
        return frames

    def _agree(self, on_device: bool) -> Offered:
        """Offer kinds of mailboxes, the preferred kind first, until the draft accepts one."""
        reason = ""
        for offer in offers(self._device, blobs=on_device):
            try:
                offered = offer()
            except CudaError as error:
                reason = error.message
                log.warning("cannot make a mailbox on the GPU", reason=reason)
                continue
            offered.offer.connection = self._number
            try:
                self._session.send(FrameKind.MAILBOX, offered.offer.SerializeToString(), offered.files)
            finally:
                offered.sent()
            ack = draft_pb2.MailboxAck.FromString(_answer(self._session, FrameKind.MAILBOX))
            if ack.accepted:
                if ack.rounds and offered.blobs is not None:
                    self.exchange = MailboxExchange(offered.blobs, self.send)
                return offered
            reason = ack.reason
            log.warning(
                "the draft refused a mailbox on the GPU; rows travel through host memory", reason=reason
            )
        raise ProtocolError(f"the draft refused every mailbox: {reason}", field="mailbox")

    def _receive(self, timeout_s: float) -> tuple[FrameKind, bytes] | None:
        """Receive a frame. While waiting, send rows that wait for a mailbox slot."""
        until = time.monotonic() + timeout_s
        while True:
            rows = self._rows
            if rows is not None:
                rows.pump()
            if rows is None or not rows.waiting or not timeout_s:
                return self._session.receive(timeout_s)
            received = self._session.receive(min(timeout_s, PUMP_S))
            timeout_s = max(0.0, until - time.monotonic())
            if received is not None or not timeout_s:
                return received


class MailboxExchange(Exchange):
    """Carries round states and trees through a mailbox, and the rounds' messages on the session socket.

    Args:
        mailbox: The mailbox that the draft service has accepted.
        send: The method of `IpcCarrier` that sends a message. This object keeps only a weak reference to the
            method.
    """

    def __init__(self, mailbox: BlobMailbox, send: Callable[[draft_pb2.SessionRequest], None]) -> None:
        self._mailbox = mailbox
        # The carrier owns this channel. A strong reference would create a cycle, which would keep the mailbox
        # and its large GPU memory alive until the garbage collector runs.
        self._send = weakref.WeakMethod(send)

    @property
    def broken(self) -> bool:
        return self._mailbox.broken

    def mend(self) -> bool:
        return self._mailbox.mend()

    def close(self) -> None:
        self._mailbox.close()

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return self._mailbox.layout.fits(state, trees)

    def exchange(
        self,
        message: draft_pb2.RoundsNext,
        state: StateBlob,
        trees: torch.Tensor,
        expected: torch.Tensor,
        limit_s: float,
        ahead: bool,
    ) -> None:
        """Enqueue the exchange. On a GPU, the host does not wait for the trees."""
        try:
            self._mailbox.send(message.number, state.packed)
            send = self._send()
            if send is not None:
                send(draft_pb2.SessionRequest(rounds_next=message))
            self._mailbox.receive(message.number, trees, expected, limit_s)
        except CudaError as error:
            log.warning("stopping rounds on the device with this draft", reason=error.message)
            self.close()

    def send_state(self) -> None:
        """Do nothing: the device does all the work."""

    def receive_trees(self, wanted: bool) -> None:
        """Do nothing: the device does all the work."""


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    """Convert socket errors into `ConnectionLost`, and decoding errors into `ProtocolError`."""
    try:
        yield
    except (EndOfStream, OSError) as error:
        raise ConnectionLost(str(error)) from None
    except DecodeError:
        raise ProtocolError("a message from the draft cannot be parsed", field="frame") from None


def _answer(frames: FrameSocket, kind: FrameKind) -> bytes:
    received = frames.receive(HANDSHAKE_TIMEOUT_S)
    if received is None:
        raise EndOfStream("the draft did not answer")
    return _checked(received, kind)


def _checked(received: tuple[FrameKind, bytes], kind: FrameKind) -> bytes:
    """Return the message of a frame of this kind. Raise an exception for an error frame."""
    if received[0] is FrameKind.ERROR:
        raise error_from_proto(common_pb2.ErrorDetail.FromString(received[1]))
    if received[0] is not kind:
        raise ProtocolError(
            f"the draft sent a {received[0].name} frame instead of a {kind.name} frame", field="frame"
        )
    return received[1]
