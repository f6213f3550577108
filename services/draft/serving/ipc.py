"""The unix-socket server of the draft for targets on the same host, as an alternative to gRPC.

The sockets carry the same messages as gRPC, in frames. Tensors are transferred through mailboxes in shared
memory. The draft's engine thread itself reads the messages and writes the replies. No message therefore waits
for a thread switch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable

import torch
from google.protobuf.message import DecodeError

from outrider.draft.v1 import draft_pb2
from outrider.services.draft.peers.exchange import Exchange
from outrider.services.draft.peers.peer import Outlet, Peer
from outrider.services.draft.peers.replies import Pong, Reply
from outrider.services.draft.serving.protocol import DraftProtocol
from outrider.services.draft.serving.session_messages import reply_to
from outrider.services.draft.serving.wakeup import Source
from outrider.shared.base.errors import OutriderError, ProtocolError
from outrider.shared.obs.logging import get_logger
from outrider.shared.rpc.common_messages import error_to_proto
from outrider.shared.rpc.interceptors import as_outrider_error
from outrider.shared.rpc.ipc.blob_mailbox import BlobMailbox
from outrider.shared.rpc.ipc.frames import EndOfStream, FrameKind, FrameSocket
from outrider.shared.rpc.ipc.handshake import Mapped, acknowledge
from outrider.shared.rpc.ipc.sockets import Listener
from outrider.shared.rpc.tensors import InlineTensors
from outrider.shared.spec.resident import StateBlob

FIRST_FRAME_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 360.0
"""Time limit from Hello to the offer of the mailboxes. The target may lend weights, and the draft may warm
up, within this limit."""
IDLE_S = 3600.0
MAX_CONNECTIONS = 128
JOIN_S = 5.0

INLINE = InlineTensors()

log = get_logger("outrider.draft")


class IpcServer:
    """A server that accepts connections from targets of the same host and user. Call `start`, then `stop`.

    Args:
        path: Path of the unix socket.
        protocol: Handles the messages.

    Raises:
        ConfigurationError: The server cannot listen on the path.
    """

    def __init__(self, path: str, protocol: DraftProtocol) -> None:
        self._protocol = protocol
        self._listener = Listener(path)
        self._lock = threading.Lock()
        self._sockets: set[FrameSocket] = set()
        self._following: dict[str, tuple[IpcSession, Peer, Mapped]] = {}
        self._thread = threading.Thread(target=self._accept, name="draft-ipc", daemon=True)

    def start(self) -> None:
        """Start accepting connections."""
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and remove the socket file."""
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for connection in sockets:
            connection.close()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            frames = FrameSocket(connection)
            with self._lock:
                full = len(self._sockets) >= MAX_CONNECTIONS
                if not full:
                    self._sockets.add(frames)
            if full:
                log.warning("refused a connection: too many are open", most=MAX_CONNECTIONS)
                frames.close()
                continue
            threading.Thread(target=self._serve, args=(frames,), name="draft-ipc-peer", daemon=True).start()

    def _serve(self, frames: FrameSocket) -> None:
        """Serve one connection. Session streams move to the engine thread. Bulk streams do not."""
        try:
            kind, payload = _expect(frames, FIRST_FRAME_TIMEOUT_S, FrameKind.HELLO, FrameKind.BULK_HELLO)
            if kind is FrameKind.HELLO:
                self._welcome(frames, draft_pb2.Hello.FromString(payload))
            else:
                self._bulk(frames, draft_pb2.BulkHello.FromString(payload))
        except EndOfStream:
            self._forget(frames)
        except Exception as error:
            _last_words(frames, error)
            self._forget(frames)
            if not isinstance(error, OutriderError):
                self._protocol.loop.on_error(error)

    def _welcome(self, frames: FrameSocket, hello: draft_pb2.Hello) -> None:
        session = IpcSession(self._protocol, frames, functools.partial(self._left, hello.target_id))
        peer, ack = self._protocol.welcome(hello, session)
        try:
            frames.send(FrameKind.HELLO, ack.SerializeToString())
            mapped = None
            while mapped is None:
                _kind, payload = _expect(frames, HANDSHAKE_TIMEOUT_S, FrameKind.MAILBOX)
                offer = draft_pb2.MailboxOffer.FromString(payload)
                files = frames.take_files(3 if offer.HasField("rounds") else 2)
                answer, mapped = acknowledge(offer, files, self._protocol.device)
                if mapped is not None:
                    session.connection = offer.connection
                    # The engine thread must start to read the stream before the target receives this reply.
                    self._follow(hello.target_id, session, peer, mapped)
                frames.send(FrameKind.MAILBOX, answer.SerializeToString())
                log.info(
                    "mailbox",
                    target_id=hello.target_id,
                    accepted=answer.accepted,
                    reason=answer.reason,
                    rounds=answer.rounds,
                )
        except BaseException:
            self._protocol.leave(peer)
            raise

    def _follow(self, target_id: str, session: IpcSession, peer: Peer, mapped: Mapped) -> None:
        with self._lock:
            self._following[target_id] = session, peer, mapped
        self._protocol.loop.call(lambda: session.begin(peer, mapped))

    def _bulk(self, frames: FrameSocket, hello: draft_pb2.BulkHello) -> None:
        """Read a target's pings until it closes the connection."""
        with self._lock:
            following = self._following.get(hello.target_id)
            # Each stream has its own thread, so the bulk stream of an earlier connection may arrive late. It
            # must not end the session stream of the current connection.
            if following is None or following[0].connection != hello.connection:
                raise EndOfStream("the target has no open session stream")
            session, peer, mapped = following
            session.bulk = frames
        try:
            while True:
                received = frames.receive(IDLE_S)
                if received is None:
                    continue
                kind, payload = received
                if kind is not FrameKind.SESSION:
                    raise ProtocolError(
                        f"Unexpected frame of kind {kind.name} on a bulk stream.", field="frame"
                    )
                self._protocol.take(peer, draft_pb2.SessionRequest.FromString(payload), INLINE)
        finally:
            if mapped.blobs is not None:
                # Close the stream on this thread, because the engine thread may be waiting for a CUDA stream
                # that waits for this target.
                mapped.blobs.close()
            self._protocol.loop.submit(session.end)

    def _left(self, target_id: str, session: IpcSession) -> None:
        with self._lock:
            following = self._following.get(target_id)
            if following is not None and following[0] is session:
                del self._following[target_id]
        self._forget(session.frames)

    def _forget(self, frames: FrameSocket) -> None:
        with self._lock:
            self._sockets.discard(frames)
        frames.close()


class IpcSession(Source, Outlet):
    """The session stream of one target on a unix socket.

    After `begin`, only the draft's engine thread reads and writes the stream.

    Args:
        protocol: Handles the messages.
        frames: The connection to the target.
        left: Function that is called with this session when the session has ended.

    Attributes:
        connection: Number of the connection. The bulk stream of this connection carries the same number.
        bulk: The bulk stream; None until it has arrived.
    """

    def __init__(
        self, protocol: DraftProtocol, frames: FrameSocket, left: Callable[[IpcSession], None]
    ) -> None:
        self.frames = frames
        self.bulk: FrameSocket | None = None
        self.connection = 0
        self._begun: tuple[Peer, Mapped] | None = None
        self._exchange: MailboxExchange | None = None
        self._protocol = protocol
        self._left = left
        self._ended = False

    def fileno(self) -> int:
        return self.frames.fileno()

    @property
    def has_unsent(self) -> bool:
        return self.frames.has_unsent

    def begin(self, peer: Peer, mapped: Mapped) -> None:
        """Start reading the stream. Called on the engine thread."""
        self._begun = peer, mapped
        self._exchange = None if mapped.blobs is None else MailboxExchange(mapped.blobs)
        if self._ended:
            self._let_go()
        else:
            self._protocol.loop.listen(self)

    def ready(self) -> None:
        assert self._begun, "the session has not begun"
        peer, mapped = self._begun
        try:
            self.frames.flush()
            while (received := self.frames.receive()) is not None:
                kind, payload = received
                if kind is not FrameKind.SESSION:
                    raise ProtocolError(
                        f"Unexpected frame of kind {kind.name} on a session stream.", field="frame"
                    )
                request = draft_pb2.SessionRequest.FromString(payload)
                self._protocol.take(
                    peer, request, mapped.bulk if request.HasField("rows") else mapped.session, self._exchange
                )
        except EndOfStream:
            self.end()
        except Exception as error:
            _last_words(self.frames, error)
            self.end()

    def send(self, reply: Reply) -> None:
        """Send a reply. Pongs use the bulk stream, because a thread of the target always reads it."""
        frames = self.bulk if isinstance(reply, Pong) else self.frames
        if frames is None or self._ended:
            return
        try:
            frames.send(FrameKind.SESSION, reply_to(reply).SerializeToString())
        except (EndOfStream, ProtocolError):
            self.end()

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._protocol.loop.unlisten(self)
        self._let_go()

    def _let_go(self) -> None:
        self._left(self)  # from here on no bulk stream can join
        if self.bulk is not None:
            self.bulk.close()
        if self._begun is not None:
            # Break the reference cycle between the peer and this session, which would keep the mailboxes
            # alive.
            (peer, mapped), self._begun, self._exchange = self._begun, None, None
            self._protocol.leave(peer)
            if mapped.blobs is not None:
                mapped.blobs.close()
            mapped.session.close()
            mapped.bulk.close()


class MailboxExchange(Exchange):
    """Transfers states and trees of rounds through a shared-memory mailbox."""

    def __init__(self, mailbox: BlobMailbox) -> None:
        self._mailbox = mailbox

    @property
    def broken(self) -> bool:
        return self._mailbox.broken

    def goes_ahead(self, message: draft_pb2.RoundsNext, tried: bool) -> bool:
        return True  # the state reaches the device without this host

    def receive_state(
        self, message: draft_pb2.RoundsNext, state: StateBlob, expected: torch.Tensor, limit_s: float
    ) -> None:
        self._mailbox.receive(message.number, state.packed, expected, limit_s)

    def send_trees(self, message: draft_pb2.RoundsNext, blob: torch.Tensor) -> None:
        self._mailbox.send(message.number, blob)

    def skip(self, series: int, number: int) -> None:
        self._mailbox.skip(number)

    def state_coming(self) -> None:
        raise _unexpected("round_soon")

    def state_arrived(self, message: draft_pb2.RoundState) -> bool:
        raise _unexpected("round_state")

    def keep_state(self, state: bytes) -> None:
        raise _unexpected("round_state")

    def mend(self) -> bool:
        return self._mailbox.mend() and not self._mailbox.broken

    def fits(self, state: torch.Tensor, trees: torch.Tensor) -> bool:
        return self._mailbox.layout.fits(state, trees)


def _unexpected(message: str) -> ProtocolError:
    """Return the error for a message whose contents belong into the mailbox."""
    return ProtocolError(
        f"Unexpected message {message} on a session stream. States go through the mailbox.", field="message"
    )


def _expect(frames: FrameSocket, timeout_s: float, *kinds: FrameKind) -> tuple[FrameKind, bytes]:
    """Receive the next frame of a handshake, which must be of one of `kinds`."""
    received = frames.receive(timeout_s)
    if received is None:
        raise EndOfStream("the target sent nothing in time")
    if received[0] not in kinds:
        raise ProtocolError(
            f"Unexpected frame of kind {received[0].name}; "
            f"expected {' or '.join(kind.name for kind in kinds)}.",
            field="frame",
        )
    return received


def _last_words(frames: FrameSocket, error: Exception) -> None:
    """Send the target the error that ends its stream, and log it."""
    mapped = as_outrider_error(
        ProtocolError("The message cannot be parsed.", field="frame")
        if isinstance(error, DecodeError)
        else error
    )
    log.warning("hung up on a target", reason=mapped.message)
    with contextlib.suppress(EndOfStream):
        frames.send(FrameKind.ERROR, error_to_proto(mapped).SerializeToString())
