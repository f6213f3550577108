"""The loop of the draft's engine thread: reads sockets, runs commands of other threads, then drafts.

The loop also closes the sessions of silent targets. While no session is open, it runs low-priority work.

The engine thread itself reads the connections of targets on this host (`Source`). Other connections (gRPC)
have threads of their own, which submit commands to the engine thread. A short urgent command, such as a round
on the device, need not wait for a thread switch. While the engine thread is idle, the receiving thread runs
such a command itself (`run_here`).
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
from outrider.shared.base.errors import OutriderError, UnavailableError
from outrider.shared.engine.loop import EngineThread, Steppable
from outrider.shared.obs.logging import get_logger

log = get_logger("outrider.draft")

T = TypeVar("T")

EXPIRY_PERIOD_S = 0.5
"""Period of the checks for silent targets, and of the functions passed to `DraftLoop.tick`."""


class DraftLoop(Steppable):
    """Drives a draft engine on its own thread.

    Args:
        engine: The engine. After `start`, only the loop may use it.
        on_error: Called with each unexpected error, on the thread on which the error occurred.
    """

    def __init__(
        self, engine: DraftEngine, on_error: Callable[[Exception], None] = lambda error: None
    ) -> None:
        self.engine = engine
        self.on_error = on_error
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
        """Stop the engine thread, then end every stream and free all sessions."""
        self._stopped = True
        self._thread.stop()
        for peer in list(self._peers.values()):
            peer.end()
            self.leave(peer)
        self._wake_up.close()

    def submit(self, command: Callable[[], object]) -> None:
        """Queue `command` for the engine thread; commands run in order. Any thread may call this."""
        self._commands.append(command)
        self._thread.wake()

    def later(self, *commands: Callable[[], object]) -> None:
        """Queue commands of low priority.

        They run one at a time, while there is no other work and no session is open. If the draft is never
        idle, they never run. Call this method on the engine thread.
        """
        self._later.extend(commands)

    def run_here(self, command: Callable[[], object]) -> None:
        """Run `command` on the caller's thread if the engine thread is idle; otherwise submit it.

        Use this method for short urgent commands. Waking a sleeping thread takes longer than such a command.
        """
        if self._turn.acquire(blocking=False):
            try:
                if not self._commands:
                    try:
                        command()
                    except Exception as error:  # handle the error as the engine thread does
                        log.exception("an engine step failed")
                        self._give_up(error)
                    return
            finally:
                self._turn.release()
        self.submit(command)

    def advance(self) -> None:
        """Extend sessions by their waiting tokens immediately, instead of at the engine's next step.

        If a session has requested a tree, this method only wakes the engine thread. The caller therefore does
        not wait for the tree. Call this method only within a command.
        """
        if self.engine.sessions.ready():
            self._thread.wake()
        elif self.engine.has_work():
            self._draft()

    def stay_awake(self, seconds: float) -> None:
        """Make the engine thread busy-poll for this many seconds instead of sleeping.

        Call this method only within a command. It has no effect if the engine thread reads no sockets, or if
        the machine has few cores.
        """
        self._wake_up.stay_awake(seconds)

    def tick(self, function: Callable[[], None]) -> None:
        """Call `function` on the engine thread once per `EXPIRY_PERIOD_S`."""
        self._ticks.append(function)

    def call(self, function: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Run `function` on the draft's engine thread. Return its result, or raise its exception.

        Raises:
            UnavailableError: The loop was stopped.
            TimeoutError: There is no result after `timeout_s` seconds.
        """
        if self._stopped:
            raise UnavailableError("The draft is shutting down.", retry_after_s=1.0)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)
                if not isinstance(error, OutriderError):
                    self.on_error(error)

        self.submit(run)
        return future.result(timeout_s)

    def listen(self, source: Source) -> None:
        """Read `source` on the engine thread from now on. Called on the engine thread."""
        self._wake_up.add(source)

    def unlisten(self, source: Source) -> None:
        """Stop reading `source`. Called on the engine thread before the source is closed; may be repeated."""
        self._wake_up.remove(source)

    def join(self, target_id: str, outlet: Outlet) -> Peer:
        """Register a session stream and end older streams of the same target. Called on the engine thread."""
        for old in [peer for peer in self._peers.values() if peer.target_id == target_id]:
            old.end()
            self.leave(old)
        peer = Peer(PeerId(next(self._peer_numbers)), target_id, outlet)
        self._peers[peer.id] = peer
        self.engine.touch(peer.id)
        return peer

    def leave(self, peer: Peer) -> None:
        """Forget a session stream and free its sessions. Called on the engine thread; may be repeated."""
        if self._peers.pop(peer.id, None) is not None:
            dropped = self.engine.drop_peer(peer.id)
            log.info("target left", target_id=peer.target_id, sessions=dropped)

    def peer_of(self, target_id: str) -> Peer | None:
        """Return the session stream of a target, or None. Called on the engine thread."""
        return next((peer for peer in self._peers.values() if peer.target_id == target_id), None)

    def has_work(self) -> bool:
        with self._turn:
            due = self._wake_up.ready() or bool(self._commands) or time.monotonic() >= self._expire_at_s
            return due or self._idles() or self.engine.has_work()

    def step(self) -> None:
        """Run pending commands, then grow the requested trees or extend one chunk of a prompt."""
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
        return self._expire_at_s

    def step_failed(self, error: Exception) -> None:
        """Forget the sessions that a failed step worked on. The targets open these sessions again."""
        with self._turn:
            self._give_up(error)

    def _idles(self) -> bool:
        """True if `later` commands are queued and no session is open."""
        return bool(self._later) and not len(self.engine.sessions)

    def _give_up(self, error: Exception) -> None:
        self.engine.metrics.failures.inc()
        lost = self.engine.give_up()
        log.error("a draft step failed", error=str(error), sessions_lost=lost)
        self.on_error(error)

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
