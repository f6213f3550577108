"""What runs on the engine thread of the draft service: what its own streams sent, commands of other threads, then drafting.

Streams of other threads (gRPC) submit commands; what is urgent and short, as a round on the device is, they run themselves while the engine
thread has nothing to do. Streams of this host are `Source`s that the engine thread itself reads. For every thread that a message passes
through costs more than the message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import TypeVar

from outrider.services.draft.engine import DraftEngine
from outrider.services.draft.peers.peer import Outlet, Peer
from outrider.services.draft.peers.replies import Rejected, Reply, frames_of
from outrider.services.draft.serving.wakeup import Source, SourceWakeUp
from outrider.services.draft.sessions.session import PeerId
from outrider.shared.base.errors import UnavailableError
from outrider.shared.engine.loop import EngineThread
from outrider.shared.obs.logging import get_logger

log = get_logger("outrider.draft")

T = TypeVar("T")

EXPIRY_PERIOD_S = 0.5


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
        self._turn = threading.Lock()
        self._ticks: list[Callable[[], None]] = []
        self._later: deque[Callable[[], object]] = deque()
        self._wake_up = SourceWakeUp()
        self._thread = EngineThread(self, name="draft-engine", event=self._wake_up)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread, then every stream; all sessions are freed."""
        self._stopped = True
        self._thread.stop()
        for peer in list(self._peers.values()):
            peer.end()
            self.leave(peer)
        self._wake_up.close()

    def submit(self, command: Callable[[], object]) -> None:
        """Have `command` run on the engine thread, in the order of submission. Any thread may call this."""
        self._commands.append(command)
        self._thread.wake()

    def later(self, command: Callable[[], object]) -> None:
        """Have `command` run when there is nothing else to do and nobody is followed, which may never be; called on the engine thread."""
        self._later.append(command)

    def run_here(self, command: Callable[[], object]) -> None:
        """Run `command` on the caller's thread, instead of the engine's, if that has nothing to do now; else submit it.

        For what is urgent and short: it takes a thread that sleeps longer to wake up than to do it.
        """
        if self._turn.acquire(blocking=False):
            try:
                if not self._commands:
                    try:
                        command()
                    except Exception as error:  # as the engine's thread would
                        log.exception("an engine step failed")
                        self._give_up(error)
                    return
            finally:
                self._turn.release()
        self.submit(command)

    def advance(self) -> None:
        """Take in now the rows that wait, which the next step would do; only within a command, on whatever thread that runs.

        Where a tree is asked for, which that thread would have to wait for, the engine thread does it.
        """
        if self.engine.sessions.ready():
            self._thread.wake()
        elif self.engine.has_work():
            self._draft()

    def stay_awake(self, seconds: float) -> None:
        """Have the engine thread not sleep for so long, where it reads streams itself and there are cores for that; within a command."""
        self._wake_up.stay_awake(seconds)

    def tick(self, function: Callable[[], None]) -> None:
        """Have the engine thread call `function` now and then."""
        self._ticks.append(function)

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

    def listen(self, source: Source) -> None:
        """Read `source` on the engine thread from now on; called there."""
        self._wake_up.add(source)

    def unlisten(self, source: Source) -> None:
        """Read `source` no more; called on the engine thread before it is closed, more than once if need be."""
        self._wake_up.remove(source)

    def join(self, target_id: str, outlet: Outlet) -> Peer:
        """Register a session stream; called on the engine thread. An older stream of the same target is ended."""
        for old in [peer for peer in self._peers.values() if peer.target_id == target_id]:
            old.end()
            self.leave(old)
        peer = Peer(PeerId(next(self._peer_numbers)), target_id, outlet)
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
        with self._turn:
            due = self._wake_up.ready() or bool(self._commands) or time.monotonic() >= self._expire_at_s
            return due or self._idles() or self.engine.has_work()

    def step(self) -> None:
        """See `Steppable.step`: what arrived, then trees for all who asked, or one chunk of a prompt."""
        with self._turn:
            self._wake_up.read()
            while self._commands:
                self._commands.popleft()()
            if time.monotonic() >= self._expire_at_s:
                self._expire()
            if self.engine.has_work():
                self._draft()
            elif self._idles():
                self._later.popleft()()

    def next_wakeup(self) -> float | None:
        """See `Steppable.next_wakeup`."""
        return self._expire_at_s

    def step_failed(self, error: Exception) -> None:
        """See `Steppable.step_failed`: the sessions in hand are forgotten; their targets open them again."""
        with self._turn:
            self._give_up(error)

    def _idles(self) -> bool:
        """Whether there is work for idle times, and this is one."""
        return bool(self._later) and not len(self.engine.sessions)

    def _give_up(self, error: Exception) -> None:
        self.engine.metrics.failures.inc()
        lost = self.engine.give_up()
        log.error("a draft step failed", error=str(error), sessions_lost=lost)

    def _expire(self) -> None:
        self._expire_at_s = time.monotonic() + EXPIRY_PERIOD_S
        for tick in self._ticks:
            tick()
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
