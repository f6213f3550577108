"""The gRPC face of the draft: one reader thread per stream hands messages to the engine thread, the call's own thread writes replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import grpc
import torch

from outrider.draft.v1 import draft_pb2, draft_pb2_grpc
from outrider.services.draft.convert import (
    CommitMessage,
    commits_from,
    hello_ack,
    opening_from,
    reply_to,
    target_info,
)
from outrider.services.draft.loop import DraftLoop, Peer
from outrider.services.draft.replies import NeedResync, Opened, Pong, Rejected
from outrider.services.draft.session import Answer, Verdict
from outrider.services.draft.strategy import TargetInfo
from outrider.shared.base.errors import CheckpointError, ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.tensors import decode_tensor, join_tensors, split_tensor
from outrider.shared.spec.drafter import SequenceOpen

R = TypeVar("R")

SERVICE_NAME = "outrider.draft.v1.Draft"
MAX_BULK_BYTES = 1024 * 1024
MAX_FP32_BYTES = 4

log = get_logger("outrider.draft")


def register(servicer: DraftServicer, server: grpc.Server) -> None:
    """Have `server` answer with `servicer`."""
    draft_pb2_grpc.add_DraftServicer_to_server(servicer, server)


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Serves the draft protocol.

    Args:
        loop: Runs the engine.
        device: For `GetInfo`.
        tokenizer: `tokenizer_fingerprint` of what drafts, which every target must have; empty when its folder tells nothing.
    """

    def __init__(self, loop: DraftLoop, device: torch.device, tokenizer: str = "") -> None:
        self._loop = loop
        self._engine = loop.engine
        self._device = device
        self._tokenizer = tokenizer
        # Fingerprints of the target that was asked to lend its tensors, and of the one that did.
        self._asked_to_lend = ""
        self._lender = ""

    def Session(
        self, request_iterator: Iterator[draft_pb2.SessionRequest], context: grpc.ServicerContext
    ) -> Iterator[draft_pb2.SessionReply]:
        """Follow one target's sequences until its stream ends."""
        first = next(_until_gone(request_iterator), None)
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            raise ProtocolError("The first message of a session stream must be Hello.", field="message")
        target = target_info(first.hello)
        ack = self._loop.call(lambda: self._welcome(target, first.hello.feature_dtype))
        peer = self._loop.call(lambda: self._loop.join(target.target_id))
        log.info("target joined", target_id=target.target_id, fingerprint=target.fingerprint[:16], missing=list(ack.missing_tensors))
        yield draft_pb2.SessionReply(hello=ack)
        reader = threading.Thread(target=self._read, args=(peer, request_iterator), name="draft-reader", daemon=True)
        reader.start()
        if not context.add_callback(lambda: peer.outbox.put(None)):
            peer.outbox.put(None)
        try:
            yield from _replies(peer)
        finally:
            self._loop.submit(lambda: self._loop.leave(peer))

    def Bulk(self, request_iterator: Iterator[draft_pb2.BulkRequest], context: grpc.ServicerContext) -> Iterator[draft_pb2.BulkReply]:
        """Take in feature rows of prompts and resyncs; each chunk is answered with how many rows are held now."""
        size = self._engine.strategy.info.feature_size
        for request in _until_gone(request_iterator):
            if len(request.features.inline) > MAX_BULK_BYTES:
                raise ProtocolError("A bulk chunk must not exceed 1 MiB of rows.", field="features")
            rows = decode_tensor(request.features, name="bulk.features", columns=size)
            answer = self._loop.call(lambda request=request, rows=rows: self._add_features(request, rows))  # type: ignore[misc]
            yield draft_pb2.BulkReply(session_id=request.session_id, epoch=request.epoch, have_len=answer.have_len)

    def GetInfo(self, request: draft_pb2.GetInfoRequest, context: grpc.ServicerContext) -> draft_pb2.GetInfoReply:
        """Describe the head, the pool and the metrics."""
        return self._loop.call(self._info)

    def GetTensor(self, request: draft_pb2.GetTensorRequest, context: grpc.ServicerContext) -> Iterator[draft_pb2.GetTensorReply]:
        """Stream one of the tensors that the target applies."""
        tensors = self._engine.strategy.feature_spec(None).projector
        tensor = tensors.get(request.name)
        if tensor is None:
            raise ProtocolError(f"{request.name!r} is not served; known: {', '.join(tensors) or 'none'}.", field="name")
        for chunk in split_tensor(request.name, tensor):
            yield draft_pb2.GetTensorReply(chunk=chunk)

    def PutTensor(self, request_iterator: Iterator[draft_pb2.PutTensorRequest], context: grpc.ServicerContext) -> draft_pb2.PutTensorReply:
        """Take tensors of the target that the head borrows."""
        wanted = self._loop.call(self._engine.strategy.missing)
        limit = max((torch.Size(shape).numel() for shape in wanted.values()), default=0) * MAX_FP32_BYTES
        for name, tensor in join_tensors((request.chunk for request in request_iterator), max_bytes=limit):
            self._loop.call(lambda name=name, tensor=tensor: self._lend(name, tensor))  # type: ignore[misc]
            log.info("borrowed from the target", tensor=name, shape=list(tensor.shape))
        return draft_pb2.PutTensorReply(still_missing=list(self._loop.call(self._engine.strategy.missing)))

    def _welcome(self, target: TargetInfo, feature_dtype: int) -> draft_pb2.HelloAck:
        """Check that head and target fit, and describe the head."""
        strategy = self._engine.strategy
        spec = strategy.feature_spec(target)
        if self._tokenizer and target.tokenizer and self._tokenizer != target.tokenizer:
            raise CheckpointError(
                "The draft has another tokenizer than the target: tokens of their tokenizer.json have different ids. Serve the target that "
                "this draft was made for, or another --draft; if only the draft's file is stale, remove it.",
                field="tokenizer",
            )
        if self._lender and self._lender != target.fingerprint:
            raise CheckpointError(
                "This draft borrowed tensors of another target and serves that one only: start a second draft, or give this one "
                "--target-weights.",
                field="target_fingerprint",
            )
        missing = list(strategy.missing())
        if missing:
            self._asked_to_lend = target.fingerprint
        limits = self._engine.sessions.limits
        return hello_ack(strategy.info, spec, missing, feature_dtype, limits.max_sessions, limits.max_shape)

    def _lend(self, name: str, tensor: torch.Tensor) -> None:
        self._engine.strategy.lend(name, tensor)
        self._lender = self._asked_to_lend

    def _read(self, peer: Peer, requests: Iterator[draft_pb2.SessionRequest]) -> None:
        """Hand a stream's messages to the engine thread until it ends."""
        try:
            for request in _until_gone(requests):
                self._dispatch(peer, request)
        except Exception as error:
            peer.fail(error)
        else:
            peer.outbox.put(None)

    def _dispatch(self, peer: Peer, request: draft_pb2.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "frame":
                size = self._engine.strategy.info.feature_size
                messages = list(commits_from(request.frame, size, time.monotonic()))
                self._loop.submit(lambda: self._commit(peer, messages))
            case "open":
                opening = opening_from(request.open)
                self._loop.submit(lambda: self._open(peer, opening))
            case "close":
                session_id = request.close.session_id
                self._loop.submit(lambda: self._engine.close(peer.id, session_id))
            case "cancel":
                round_number = request.cancel.round
                self._loop.submit(lambda: self._engine.cancel(peer.id, round_number))
            case "ping":
                nonce = request.ping.nonce
                self._loop.submit(lambda: self._pong(peer, nonce))
            case other:
                raise ProtocolError(f"Unexpected message {other or 'without content'} on a session stream.", field="message")

    def _open(self, peer: Peer, opening: SequenceOpen) -> None:
        session_id, epoch = opening.fence.session_id, opening.fence.epoch
        answer = self._engine.open(peer.id, opening)
        if answer.verdict is Verdict.ACCEPTED:
            peer.send(Opened(session_id, epoch, answer.have_len))
        else:
            self._refuse(peer, session_id, epoch, answer)

    def _commit(self, peer: Peer, messages: list[CommitMessage]) -> None:
        for message in messages:
            answer = self._engine.commit(peer.id, message.commit, message.ask)
            self._refuse(peer, message.commit.fence.session_id, message.commit.fence.epoch, answer)

    def _add_features(self, request: draft_pb2.BulkRequest, rows: torch.Tensor) -> Answer:
        peer = self._loop.peer_of(request.target_id)
        if peer is None:
            return Answer(Verdict.DROPPED)
        answer = self._engine.add_features(peer.id, request.session_id, request.epoch, request.base, rows)
        self._refuse(peer, request.session_id, request.epoch, answer)
        return answer

    @staticmethod
    def _refuse(peer: Peer, session_id: int, epoch: int, answer: Answer) -> None:
        """Tell a target what it must do about a message that was not accepted; what was dropped needs nothing."""
        reason = answer.reason.value
        if answer.verdict is Verdict.RESYNC:
            peer.send(NeedResync(session_id, epoch, reason))
        elif answer.verdict is Verdict.REJECTED:
            peer.send(Rejected(session_id, reason, answer.retry_after_ms))

    def _pong(self, peer: Peer, nonce: int) -> None:
        self._engine.touch(peer.id)
        sessions = self._engine.sessions
        load = len(sessions) / sessions.limits.max_sessions
        peer.send(Pong(nonce, load))

    def _info(self) -> draft_pb2.GetInfoReply:
        strategy, sessions = self._engine.strategy, self._engine.sessions
        pages = strategy.pages()
        limits = sessions.limits
        return draft_pb2.GetInfoReply(
            head=hello_ack(strategy.info, None, list(strategy.missing()), 0, limits.max_sessions, limits.max_shape),
            sessions=len(sessions),
            pages_total=pages.total,
            pages_free=pages.free,
            pages_held=pages.held,
            device=str(self._device),
            prometheus_text=self._engine.metrics.render(),
        )


def _until_gone(requests: Iterator[R]) -> Iterator[R]:
    """Yield a stream's requests; a peer that cancelled or vanished ends them as one that finished does."""
    while True:
        try:
            request = next(requests, None)
        except grpc.RpcError:
            return
        if request is None:
            return
        yield request


def _replies(peer: Peer) -> Iterator[draft_pb2.SessionReply]:
    """Yield a stream's replies until it is to end."""
    while True:
        reply = peer.outbox.get()
        if reply is None:
            return
        if isinstance(reply, Exception):
            raise reply
        yield reply_to(reply)
