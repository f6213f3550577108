"""The draft's side of the protocol between target and draft: handles each message of a target, and replies.

The module also compares tokenizers when a target sends Hello. It chooses the target that lends tensors, and
the thread that runs each command. Transports (gRPC, unix sockets) only deliver messages.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.peers.exchange import Exchange
from outrider.services.draft.peers.peer import Outlet, Peer
from outrider.services.draft.peers.peer_slots import PeerSlots
from outrider.services.draft.peers.replies import (
    EntryReply,
    ExchangeEnded,
    NeedResync,
    Opened,
    Pong,
    Rejected,
    SlotsOpened,
)
from outrider.services.draft.serving.loop import DraftLoop
from outrider.services.draft.serving.session_messages import (
    CommitMessage,
    commits_from,
    hello_ack,
    opening_from,
    target_info,
)
from outrider.services.draft.sessions.session import MessageResult, MessageVerdict
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.warmup import warm_up
from outrider.shared.base.errors import CheckpointError, ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.ipc.doorbells import Side
from outrider.shared.rpc.tensors import TensorReader
from outrider.shared.rpc.version import VersionOffer, agree
from outrider.shared.spec.drafter import SequenceOpen

log = get_logger("outrider.draft")

PREFILL_S = 0.03
"""Seconds that the engine thread busy-polls, after Open, for the rows of a short prompt. A sleeping thread
would wake up late, and the target would have to wait."""
BEGINNING_S = 0.005
"""Seconds that the engine thread busy-polls for the first round after the rows of a short prompt."""
PASS_ROWS = 512
"""Number of prompt rows that justify a separate pass before the remaining rows have arrived."""


class DraftProtocol:
    """Converts the messages of targets to commands for the draft engine.

    Unless noted otherwise, methods may be called on any thread except the engine thread.

    Args:
        loop: The loop of the engine thread.
        device: Device of the engine.
        tokenizer: `tokenizer_fingerprint` of the draft, which every target must match; empty if unknown.
        only_enqueues: True if the host only enqueues the work for a prompt or a round, as on a GPU. The
            thread that receives the message may then run this work itself. It then does not contend with the
            engine thread for the GIL. With None, the value is True on CUDA and False elsewhere.
        tiles: Whether the warm-up tunes kernel tiles; the argument `tiles` of `warm_up`.
        began_s: Time at which the draft began to load, from `time.monotonic()`. None for now.
    """

    def __init__(
        self,
        loop: DraftLoop,
        device: torch.device,
        tokenizer: str = "",
        *,
        only_enqueues: bool | None = None,
        tiles: bool = True,
        began_s: float | None = None,
    ) -> None:
        self._began_s = time.monotonic() if began_s is None else began_s
        self.loop = loop
        self.device = device
        self._only_enqueues = device.type == "cuda" if only_enqueues is None else only_enqueues
        self._engine = loop.engine
        self._tokenizer = tokenizer
        self._tiles = tiles
        self._slots = PeerSlots(loop.engine, device)
        # The fingerprint of the target that was last asked to lend tensors, and of the target that lent them.
        self._asked_to_lend = ""
        self._lender = ""

    @property
    def feature_size(self) -> int:
        """Width of a feature row."""
        return self._engine.strategy.info.feature_size

    def welcome(self, hello: draft_pb2.Hello, outlet: Outlet) -> tuple[Peer, draft_pb2.HelloAck]:
        """Reply to Hello, the first message of a session stream. Do not call this on the engine thread.

        Raises:
            OutriderError: The draft and the target do not fit together. The message contains the reason.
        """
        agreed = agree(VersionOffer.of(hello), VersionOffer.ours(Side.DRAFT))
        target = target_info(hello)
        ack = self.loop.call(lambda: self._describe(target, hello.feature_dtype, agreed.version))
        peer = self.loop.call(lambda: self.loop.join(target.target_id, outlet))
        log.info(
            "target joined",
            target_id=target.target_id,
            fingerprint=target.fingerprint[:16],
            missing=list(ack.missing_tensors),
            protocol=str(agreed),
        )
        return peer, ack

    def leave(self, peer: Peer) -> None:
        """Free the sessions and rounds of a stream that has ended."""
        self.loop.submit(lambda: self._leave(peer))

    def take(
        self,
        peer: Peer,
        request: draft_pb2.SessionRequest,
        tensors: TensorReader,
        exchange: Exchange | None = None,
    ) -> None:
        """Handle one message of a target's session stream.

        Any thread may call this method, including the engine thread.

        Args:
            peer: The session stream.
            request: The message.
            tensors: Reader of the tensors that this transport carries.
            exchange: Transfers states and trees of rounds on the device; None if such rounds are impossible.

        Raises:
            ProtocolError: The message is malformed, or a message of this kind is not expected at this point.
        """
        loop = self.loop
        match request.WhichOneof("message"):
            case "frame":
                messages = list(commits_from(request.frame, self.feature_size, time.monotonic(), tensors))
                loop.submit(lambda: self._commit(peer, messages))
            case "open":
                opening = opening_from(request.open, peer.target_id)
                loop.submit(lambda: self._open(peer, opening))
            case "rows":
                some = request.rows
                rows = tensors.read(some.features, "rows.features", self.feature_size)
                # While rounds run on the device, this thread must not compute. The computation could wait for
                # a state that this very thread has yet to deliver.
                if self._only_enqueues and self._slots.peer is None:
                    loop.run_here(lambda: self._take_in(peer, some, rows))
                else:
                    loop.submit(lambda: self._add_features(peer, some, rows))
            case "close":
                session_id = request.close.session_id
                loop.submit(lambda: self._engine.close(peer.id, session_id))
            case "cancel":
                round_number = request.cancel.round
                loop.submit(lambda: self._engine.cancel(peer.id, round_number))
            case "ping":
                nonce = request.ping.nonce
                loop.submit(lambda: self._pong(peer, nonce))
            case "rounds_next" if exchange is not None:
                following = request.rounds_next
                loop.run_here(lambda: self._run_round(peer, following, exchange))
            case "round_soon" if exchange is not None:
                exchange.state_coming()
            case "round_state" if exchange is not None:
                state = request.round_state
                # Bypass the loop. The engine thread may be waiting for the device, which waits for this
                # state.
                if exchange.state_arrived(state):
                    return
                loop.run_here(lambda: self._start_round(peer, state, exchange))
            case "slots_open" if exchange is not None:
                opening_slots = request.slots_open
                loop.submit(lambda: peer.send(SlotsOpened(self._slots.open(peer, opening_slots))))
            case "slots_update" if exchange is not None:
                update = request.slots_update
                loop.submit(lambda: self._slots.update(peer, update))
            case "rounds_prepare" if exchange is not None:
                size = request.rounds_prepare
                loop.submit(lambda: loop.later(lambda: self._slots.record(size)))
            case "rounds_enter":
                peer.send(EntryReply(request.rounds_enter.rounds, "version"))
            case "rounds_leave":
                pass  # a target of version 2 leaves the rounds that were refused
            case other:
                raise ProtocolError(
                    f"Unexpected message {other or 'without content'} on a session stream.", field="message"
                )

    def take_bulk(self, request: draft_pb2.BulkRequest, tensors: TensorReader) -> draft_pb2.BulkReply:
        """Store the feature rows that a target's BulkRequest contains.

        The rows belong to a prompt, or to a session that is opened again after a resync. Do not call this
        method on the engine thread.

        Returns:
            The reply, with the number of rows stored so far.
        """
        rows = tensors.read(request.features, "bulk.features", self.feature_size)
        answer = self.loop.call(
            lambda: self._add_features(self.loop.peer_of(request.target_id), request, rows)
        )
        return draft_pb2.BulkReply(
            session_id=request.session_id, epoch=request.epoch, have_len=answer.have_len
        )

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Receive a tensor that the draft borrows from the target. Call this on the engine thread.

        When the last such tensor has arrived, the warm-up runs. The warm-up returns further work, which runs
        while no session is open.

        Raises:
            OutriderError: The warm-up failed; see `warm_up`.
        """
        missed = bool(self._engine.strategy.missing())
        self._engine.strategy.lend(name, tensor)
        self._lender = self._asked_to_lend
        if missed and not self._engine.strategy.missing():
            self.loop.later(*warm_up(self._engine, self.device, tiles=self._tiles))

    def info(self) -> draft_pb2.GetInfoReply:
        """Describe the draft, its KV pool and its metrics. Called on the engine thread."""
        strategy, sessions = self._engine.strategy, self._engine.sessions
        pages = strategy.pages()
        return draft_pb2.GetInfoReply(
            head=hello_ack(
                strategy.info, None, list(strategy.missing()), 0, sessions.limits, self._uptime_s()
            ),
            sessions=len(sessions),
            pages_total=pages.total,
            pages_free=pages.free,
            pages_held=pages.held,
            device=str(self.device),
            prometheus_text=self._engine.metrics.render(),
        )

    def _uptime_s(self) -> float:
        return time.monotonic() - self._began_s

    def _describe(self, target: TargetInfo, feature_dtype: int, version: int) -> draft_pb2.HelloAck:
        """Check that draft and target fit, and return the draft's description."""
        strategy = self._engine.strategy
        spec = strategy.feature_spec(target)
        if self._tokenizer and target.tokenizer and self._tokenizer != target.tokenizer:
            raise CheckpointError(
                "The draft and the target have different tokenizers: their tokenizer.json files map tokens "
                "to different ids. Serve the target that this draft was trained for, or choose another "
                "--draft. If only the draft's tokenizer.json is outdated, remove that file.",
                field="tokenizer",
            )
        if self._lender and self._lender != target.fingerprint:
            raise CheckpointError(
                "This draft has borrowed tensors of another target and can serve only that one. Start a "
                "second draft, or start this one with --target-weights.",
                field="target_fingerprint",
            )
        missing = list(strategy.missing())
        if missing:
            self._asked_to_lend = target.fingerprint
        limits = self._engine.sessions.limits
        return hello_ack(strategy.info, spec, missing, feature_dtype, limits, self._uptime_s(), version)

    def _leave(self, peer: Peer) -> None:
        self._slots.leave(peer)
        self.loop.leave(peer)

    def _run_round(self, peer: Peer, message: draft_pb2.RoundsNext, exchange: Exchange) -> None:
        """Enqueue or prepare the next round. May run on a thread other than the engine thread."""
        self._answer_round(peer, message, exchange, lambda: self._slots.run(peer, message, exchange))

    def _start_round(self, peer: Peer, message: draft_pb2.RoundState, exchange: Exchange) -> None:
        """Enqueue the prepared round whose state has arrived. May run outside the engine thread."""
        if exchange.state_arrived(message):  # the round was enqueued after this message arrived
            return
        exchange.keep_state(message.state)
        self._answer_round(peer, message, exchange, lambda: self._slots.go(peer, message, exchange))

    def _answer_round(
        self,
        peer: Peer,
        message: draft_pb2.RoundsNext | draft_pb2.RoundState,
        exchange: Exchange,
        run: Callable[[], str],
    ) -> None:
        """Run a round. If the round cannot run, send a reply that ends the target's wait."""
        try:
            with self._on_device():
                reason = run()
        except Exception:
            self._slots.abandon(peer)
            exchange.skip(message.rounds, message.number)
            peer.send(ExchangeEnded(message.rounds, "failed"))
            raise
        if reason:
            exchange.skip(message.rounds, message.number)
            peer.send(ExchangeEnded(message.rounds, reason))

    def _open(self, peer: Peer, opening: SequenceOpen) -> None:
        self.loop.stay_awake(PREFILL_S)
        self._slots.make_way(peer)
        session_id, epoch = opening.fence.session_id, opening.fence.epoch
        answer = self._engine.open(peer.id, opening)
        if answer.verdict is MessageVerdict.ACCEPTED:
            peer.send(Opened(session_id, epoch, answer.have_len))
            self._slots.report_ready(peer, session_id)
        else:
            self._refuse(peer, session_id, epoch, answer)

    def _commit(self, peer: Peer, messages: list[CommitMessage]) -> None:
        for message in messages:
            answer = self._engine.commit(peer.id, message.commit, message.ask)
            self._slots.report_ready(peer, message.commit.fence.session_id)
            self._refuse(peer, message.commit.fence.session_id, message.commit.fence.epoch, answer)

    def _take_in(self, peer: Peer, request: draft_pb2.BulkRequest, rows: torch.Tensor) -> None:
        """Store rows of a prompt; extend if there are enough rows. May run outside the engine thread."""
        sessions = self._engine.sessions
        with self._on_device():
            self._add_features(peer, request, rows)
            session = sessions.get(peer.id, request.session_id)
            if session is not None and (sessions.complete(session) or session.extendable_rows >= PASS_ROWS):
                self.loop.advance()

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Select the engine's CUDA device for launches on threads other than the engine thread."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _add_features(
        self, peer: Peer | None, request: draft_pb2.BulkRequest, rows: torch.Tensor
    ) -> MessageResult:
        if peer is None:
            return MessageResult(MessageVerdict.DROPPED)
        self.loop.stay_awake(BEGINNING_S)
        answer = self._engine.add_features(peer.id, request.session_id, request.epoch, request.base, rows)
        self._refuse(peer, request.session_id, request.epoch, answer)
        self._slots.report_ready(peer, request.session_id)
        return answer

    @staticmethod
    def _refuse(peer: Peer, session_id: int, epoch: int, answer: MessageResult) -> None:
        """Send the reply that a RESYNC or REJECTED verdict requires. Other verdicts need no reply."""
        reason = answer.reason.value
        if answer.verdict is MessageVerdict.RESYNC:
            peer.send(NeedResync(session_id, epoch, reason))
        elif answer.verdict is MessageVerdict.REJECTED:
            peer.send(Rejected(session_id, reason, answer.retry_after_ms))

    def _pong(self, peer: Peer, nonce: int) -> None:
        self._engine.touch(peer.id)
        sessions = self._engine.sessions
        load = len(sessions) / sessions.limits.max_sessions
        peer.send(Pong(nonce, load))
