"""What runs on the engine thread of the draft service: commands of the streams, then drafting. Streams never touch the engine otherwise."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from typing import TypeVar

from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.replies import Rejected, Reply, frames_of
from outrider.services.draft.session import PeerId
from outrider.shared.base.errors import UnavailableError
from outrider.shared.engine.loop import EngineThread
from outrider.shared.obs.logging import get_logger

log = get_logger("outrider.draft")

T = TypeVar("T")

EXPIRY_PERIOD_S = 0.5
MAX_UNSENT = 4096
"""Replies waiting for a target that does not read; beyond them its stream is ended."""

Outbox = SimpleQueue[Reply | Exception | None]
"""Replies of one session stream, in order; an exception ends it with an error, None ends it."""


class Peer:
    """One session stream: its outbox, and who is on the other end."""

    def __init__(self, peer_id: PeerId, target_id: str) -> None:
        self.id = peer_id
        self.target_id = target_id
        self.outbox: Outbox = SimpleQueue()

    def send(self, reply: Reply) -> None:
        """Queue a reply."""
        if self.outbox.qsize() < MAX_UNSENT:
            self.outbox.put(reply)
        else:
            self.outbox.put(None)

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self.outbox.put(error)


class DraftLoop:
    """Drives the engine: `Steppable` of an `EngineThread`.

    Args:
        engine: The engine; from `start` on it belongs to the loop's thread.
    """

    def __init__(self, engine: DraftEngine) -> None:
        self.engine = engine
        self._commands: deque[Callable[[], object]] = deque()
        self._peers: dict[PeerId, Peer] = {}
        self._peer_numbers = count(1)
        self._expire_at_s = 0.0
        self._stopped = False
        self._thread = EngineThread(self, name="draft-engine")

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread, then every stream; all sessions are freed."""
        self._stopped = True
        self._thread.stop()
        for peer in list(self._peers.values()):
            peer.outbox.put(None)
            self.leave(peer)

    def submit(self, command: Callable[[], object]) -> None:
        """Have `command` run on the engine thread, in the order of submission. Any thread may call this."""
        self._commands.append(command)
        self._thread.wake()

    def call(self, function: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Run `function` on the engine thread and return its result, or raise what it raised."""
        if self._stopped:
            raise UnavailableError("The draft is shutting down.", retry_after_s=1.0)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self.submit(run)
        return future.result(timeout_s)

    def join(self, target_id: str) -> Peer:
        """Register a session stream; called on the engine thread. An older stream of the same target is ended."""
        for old in [peer for peer in self._peers.values() if peer.target_id == target_id]:
            old.outbox.put(None)
            self.leave(old)
        peer = Peer(PeerId(next(self._peer_numbers)), target_id)
        self._peers[peer.id] = peer
        self.engine.touch(peer.id)
        return peer

    def leave(self, peer: Peer) -> None:
        """Forget a session stream and free its sessions; called on the engine thread, more than once if need be."""
        if self._peers.pop(peer.id, None) is not None:
            dropped = self.engine.drop_peer(peer.id)
            log.info("target left", target_id=peer.target_id, sessions=dropped)

    def peer_of(self, target_id: str) -> Peer | None:
        """Return the stream of a target; called on the engine thread."""
        return next((peer for peer in self._peers.values() if peer.target_id == target_id), None)

    def has_work(self) -> bool:
        """See `Steppable.has_work`."""
        return bool(self._commands) or time.monotonic() >= self._expire_at_s or self.engine.has_work()

    def step(self) -> None:
        """See `Steppable.step`: what arrived, then trees for all who asked, or one chunk of a prompt."""
        while self._commands:
            self._commands.popleft()()
        if time.monotonic() >= self._expire_at_s:
            self._expire()
        if self.engine.has_work():
            self._draft()

    def next_wakeup(self) -> float | None:
        """See `Steppable.next_wakeup`."""
        return self._expire_at_s

    def step_failed(self, error: Exception) -> None:
        """See `Steppable.step_failed`: the sessions in hand are forgotten; their targets open them again."""
        self.engine.metrics.failures.inc()
        lost = self.engine.give_up()
        log.error("a draft step failed", error=str(error), sessions_lost=lost)

    def _expire(self) -> None:
        self._expire_at_s = time.monotonic() + EXPIRY_PERIOD_S
        expired = self.engine.expire()
        if expired:
            log.warning("sessions of a silent target freed", sessions=expired)
        if not len(self.engine.sessions):
            self.engine.check()

    def _draft(self) -> None:
        started = time.monotonic()
        drafted = self.engine.step()
        for refusal in drafted.refusals:
            self._send(refusal.peer, Rejected(refusal.session_id, "kv_full", refusal.retry_after_ms))
        if drafted.proposals:
            for peer_id, frames in frames_of(drafted.proposals, (time.monotonic() - started) * 1000).items():
                for frame in frames:
                    self._send(peer_id, frame)

    def _send(self, peer_id: PeerId, reply: Reply) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.send(reply)
