"""The gRPC servicer of the draft. Its calls are Session, Bulk, GetInfo, GetTensor and PutTensor.

Each session stream is a `ServerStream`. The thread that polls the gRPC server converts messages directly to
commands of the draft engine. The engine thread itself sends the replies. The gRPC handler threads only wait
until their streams end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

import grpc
import torch
from google.protobuf.message import DecodeError

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.draft.peers.peer import Peer
from outrider.services.draft.peers.replies import Reply, StateTaken, TreesReply
from outrider.services.draft.peers.stream_exchange import StreamExchange
from outrider.services.draft.serving.protocol import DraftProtocol
from outrider.services.draft.serving.session_messages import reply_to
from outrider.shared.base.errors import ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.direct_server import ServerStream
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.polling import PollWindow
from outrider.shared.rpc.relay import StreamRelay
from outrider.shared.rpc.tensors import InlineTensors, join_tensors, split_tensor
from outrider.shared.rpc.version import Feature, VersionOffer, agree

R = TypeVar("R")

SERVICE_NAME = "outrider.draft.v1.Draft"
MAX_BULK_BYTES = 1024 * 1024
MAX_FP32_BYTES = 4
NEXT_S = 0.05
"""Seconds that the polling thread busy-polls for the message after a message of `FOLLOWED_KINDS`."""
FOLLOWED_KINDS = frozenset(("open", "frame", "round_soon", "round_state"))
"""Kinds of messages that are soon followed by another message."""
WARM_UP_S = 300.0
"""Time limit of the warm-up after the last borrowed tensor. On a machine's first start, the warm-up compiles
kernels."""
MAX_UNSENT = 4096
"""Largest number of queued replies to a target that does not read. One more reply ends the target's
stream."""
TAKEN = draft_pb2.SessionReply(round_taken=draft_pb2.RoundTaken()).SerializeToString()

log = get_logger("outrider.draft")


def register_draft(servicer: DraftServicer, server: grpc.Server) -> None:
    """Register `servicer` on `server`."""
    draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)


class StreamOutlet:
    """Sends replies on a gRPC session stream (an `Outlet`)."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        self._stream: ServerStream | None = None

    def open(self, stream: ServerStream) -> None:
        """Send over `stream` from now on."""
        self._stream = stream

    def close(self) -> None:
        """Drop all further replies.

        Also drop the reference to the stream, because the stream refers back to its own callbacks.
        """
        self._stream = None

    def send(self, reply: Reply) -> None:
        """Send a reply, or drop it after `close`. Never blocks."""
        stream = self._stream  # read once, because another thread may call `close`
        if stream is None:
            return
        if isinstance(reply, TreesReply) and reply.envelope is not None:
            stream.send(reply.envelope.seal(reply.trees))
        elif isinstance(reply, StateTaken):
            stream.send(TAKEN, reply.then)
        else:
            stream.send(reply_to(reply).SerializeToString())


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Serves the draft protocol over gRPC."""

    def __init__(self, protocol: DraftProtocol) -> None:
        self._protocol = protocol
        self._loop = protocol.loop
        self._engine = protocol.loop.engine
        self._tensors = InlineTensors(protocol.device)
        self._poll_window = PollWindow()
        self._loop.tick(self._poll_window.begin)

    def Session(
        self, request_iterator: Iterator[draft_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.SessionReply]:
        """Follow one target's sequences until its stream ends."""
        first = next(_until_gone(request_iterator), None)
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            raise ProtocolError("The first message of a session stream must be Hello.", field="message")
        # An entry in this queue ends the stream: an error, or None for a regular end.
        endings: SimpleQueue[Exception | None] = SimpleQueue()
        outlet = StreamOutlet(lambda: endings.put(None))
        peer, ack = self._protocol.welcome(first.hello, outlet)
        yield draft_pb2.SessionReply(hello=ack)
        agreed = agree(VersionOffer.of(first.hello), VersionOffer.ours(Side.DRAFT))
        exchange = StreamExchange(
            peer,
            self._relay(),
            compact=Feature.COMPACT_STATES in agreed.features,
        )
        stream = ServerStream(
            context,
            lambda message: self._take(peer, message, exchange),
            endings.put,
            MAX_UNSENT,
            self._poll_window,
        )
        outlet.open(stream)
        stream.start()
        try:
            error = endings.get()
            if error is not None:
                raise error
        finally:
            # Close the stream here and not on the engine thread, which may be waiting for a CUDA stream that
            # waits for this target.
            exchange.close()
            stream.flush()
            outlet.close()
            self._protocol.leave(peer)

    def _relay(self) -> StreamRelay | None:
        try:
            return StreamRelay.try_make(Side.DRAFT, self._protocol.device)
        except RuntimeError as error:
            self._loop.on_error(error)
            raise

    def Bulk(
        self, request_iterator: Iterator[draft_pb2.BulkRequest], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.BulkReply]:
        """Store feature rows of prompts and resyncs. Each reply has the number of rows stored so far."""
        for request in _until_gone(request_iterator):
            if len(request.features.inline) > MAX_BULK_BYTES:
                raise ProtocolError(
                    "A bulk chunk has more than 1 MiB of rows; send smaller chunks.", field="features"
                )
            yield self._protocol.take_bulk(request, self._tensors)

    def GetInfo(
        self, request: draft_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> draft_pb2.GetInfoReply:
        """Describe the draft, its KV pool and its metrics."""
        return self._loop.call(self._protocol.info)

    def GetTensor(
        self, request: draft_pb2.GetTensorRequest, context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.GetTensorReply]:
        """Stream one of the projector tensors that the target applies."""
        tensors = self._engine.strategy.feature_spec(None).projector
        tensor = tensors.get(request.name)
        if tensor is None:
            raise ProtocolError(
                f"Tensor {request.name!r} is not available; available: {', '.join(tensors) or 'none'}.",
                field="name",
            )
        for chunk in split_tensor(request.name, tensor):
            yield draft_pb2.GetTensorReply(chunk=chunk)

    def PutTensor(
        self, request_iterator: Iterator[draft_pb2.PutTensorRequest], context: grpc.ServicerContext
    ) -> draft_pb2.PutTensorReply:
        """Receive tensors that the draft borrows from the target."""
        wanted = self._loop.call(self._engine.strategy.missing)
        limit = max((torch.Size(shape).numel() for shape in wanted.values()), default=0) * MAX_FP32_BYTES
        for name, tensor in join_tensors((request.chunk for request in request_iterator), max_bytes=limit):
            self._loop.call(lambda name=name, tensor=tensor: self._protocol.lend(name, tensor), WARM_UP_S)  # type: ignore[misc]
            log.info("borrowed from the target", tensor=name, shape=list(tensor.shape))
        return draft_pb2.PutTensorReply(still_missing=list(self._loop.call(self._engine.strategy.missing)))

    def _take(self, peer: Peer, message: bytes, exchange: StreamExchange) -> None:
        """Handle a message of a session stream, on the server's polling thread."""
        if exchange.finish_sealed(message):
            self._poll_window.expect(NEXT_S)
            return
        try:
            request = draft_pb2.SessionRequest.FromString(message)
        except DecodeError:
            raise ProtocolError("The message cannot be parsed.", field="message") from None
        self._protocol.take(peer, request, self._tensors, exchange)
        kind = request.WhichOneof("message")
        if kind in FOLLOWED_KINDS:
            self._poll_window.expect(NEXT_S)
        elif kind == "rounds_leave":
            self._poll_window.rest()


def _until_gone(requests: Iterator[R]) -> Iterator[R]:
    """Yield a stream's requests, and end normally if the peer cancels or disappears."""
    while True:
        try:
            request = next(requests, None)
        except grpc.RpcError:
            return
        if request is None:
            return
        yield request
