"""Rank 0's control of the other ranks: sends commands, and notices when a rank is dead, silent or stuck.

The other ranks send regular heartbeats ("beats", see `channel`). A rank that stops sending beats is
considered lost.
"""

from __future__ import annotations

import contextlib
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.distributed import DistError

from outrider.shared.base.errors import OutriderError, UnavailableError
from outrider.shared.obs.logging import get_logger
from outrider.shared.parallel.channel import BEAT_S, RankConnection, ReportKind
from outrider.shared.parallel.commands import Command, Stop, encode

SILENT_BEATS = 15
"""Number of missed beats after which a rank is considered lost: it is stopped or cut off from the network."""
QUIET_BEATS = 3
"""Number of missed beats after which a rank is named as the cause when an error occurs."""
NOTICE_S = 1.0

_LIBRARY_PLACE = re.compile(r"\[[^\]]*\.(cc|cpp|h|hpp|cu):\d+\]")
_log = get_logger("outrider.parallel")

FailureHandler = Callable[[OutriderError], None]


class Lead:
    """Sends commands to the other ranks in order. Fails the group of ranks permanently if a rank is lost.

    Args:
        connections: One connection per rank, starting with rank 1.
        on_failure: Called once, on any thread, when a rank is lost or out of step. The handler must end the
            process, because a running collective may never return.
        step_timeout_s: Largest number of seconds between two commands of a step (see `step`). Unlimited by
            default.
        bounded: True if collectives inside `together` end with an error after a time limit of their own, as
            with gloo. With NCCL, a collective in a CUDA graph may wait forever.
    """

    def __init__(
        self,
        connections: Mapping[int, RankConnection],
        on_failure: FailureHandler,
        step_timeout_s: float = math.inf,
        *,
        bounded: bool = False,
    ) -> None:
        self.failure: OutriderError | None = None
        self._connections = dict(connections)
        self._on_failure = on_failure
        self._done: dict[int, queue.Queue[str]] = {rank: queue.Queue() for rank in connections}
        self._silent = dict.fromkeys(connections, 0)
        self._lock = threading.Lock()
        self._noticed = threading.Event()
        self._closing = False
        self._step_timeout_s = step_timeout_s
        self._bounded = bounded
        self._in_step = False
        self._together = False
        self._step_beats = 0
        for rank in connections:
            threading.Thread(target=self._listen, args=(rank,), name=f"tp-rank-{rank}", daemon=True).start()
        threading.Thread(target=self._watch, name="tp-watch", daemon=True).start()

    def send(self, command: Command) -> None:
        """Send a command to all ranks.

        Raises:
            OutriderError: The group has failed.
        """
        if self.failure is not None:
            raise self.failure
        self._step_beats = 0
        body = encode(command)
        for rank, connection in self._connections.items():
            try:
                connection.send(body)
            except OSError as error:
                raise self.fail(_lost(rank, str(error))) from error

    @contextmanager
    def together(self, command: Command) -> Iterator[None]:
        """Context manager: send a command to the other ranks. Rank 0's own part runs in the `with` block.

        If the block raises an error, the other ranks have run a command that rank 0 has not finished. The
        group of ranks therefore fails permanently.
        """
        self.send(command)
        self._together = True
        try:
            yield
        except BaseException as error:
            raise self.fail(self._explained(command, error)) from error
        finally:
            self._step_beats = 0
            self._together = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Fail the group if the `with` block does not finish in time. Only one thread may use this method."""
        # This thread may be waiting for the device and cannot be woken then, so the thread of `_watch` has to
        # fail the group.
        self._step_beats = 0
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def wait_done(self, timeout_s: float) -> dict[int, str]:
        """Wait until every other rank has reported the end of its command. Return the text of each report.

        Raises:
            OutriderError: A rank failed or did not report in time.
        """
        deadline = time.monotonic() + timeout_s
        texts: dict[int, str] = {}
        for rank, reports in self._done.items():
            while rank not in texts:
                if self.failure is not None:
                    raise self.failure
                if time.monotonic() > deadline:
                    raise self.fail(_lost(rank, f"it did not finish within {timeout_s:g} s"))
                try:
                    texts[rank] = reports.get(timeout=0.1)
                except queue.Empty:
                    continue
        return texts

    def fail(self, error: OutriderError) -> OutriderError:
        """Mark the group of ranks as failed, call `on_failure`, and return the error.

        If the group has failed already, only return the error of the first failure.
        """
        with self._lock:
            if self.failure is not None or self._closing:
                return self.failure or error
            self.failure = error
        self._noticed.set()
        _log.error("tensor parallel group failed", error=error.message)
        self._on_failure(error)
        return error

    def close(self) -> None:
        """Stop the other ranks and close their connections."""
        if self._in_step:  # The step will never return, so this process cannot exit normally.
            self.fail(
                UnavailableError(
                    "tp: stopped in the middle of a step that does not return.", reason="rank_failed"
                )
            )
        with self._lock:
            self._closing = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # The rank has exited already.
                connection.send(encode(Stop()))
            connection.close()

    def _listen(self, rank: int) -> None:
        """Receive a rank's reports until its connection closes."""
        connection = self._connections[rank]
        while True:
            report = connection.receive_report()
            if report is None:
                self.fail(_lost(rank, "its connection ended"))
                return
            self._silent[rank] = 0
            if report.kind is ReportKind.DONE:
                self._done[rank].put(report.text)
            elif report.kind is ReportKind.FAILED:
                self.fail(UnavailableError(f"tp: rank {rank} failed: {report.text}", reason="rank_failed"))

    def _watch(self) -> None:
        """Watch for silent ranks and for a step that does not return, until the group fails or closes.

        Time is counted in iterations of this thread, one per beat. The count stops while this process is
        suspended, so a suspension does not look like a silent rank.
        """
        while self.failure is None and not self._closing:
            time.sleep(BEAT_S)
            for rank in self._silent:
                self._silent[rank] += 1
                if self._silent[rank] > SILENT_BEATS:
                    self.fail(_silent([rank], SILENT_BEATS))
            if self._in_step and not (self._together and self._bounded):
                self._step_beats += 1
                if self._step_beats * BEAT_S > self._step_timeout_s and not self._undecided():
                    problem = (
                        f"tp: a step has not returned for {self._step_timeout_s:g} s although all ranks run; "
                        "start the target again."
                    )
                    self.fail(self._blame() or UnavailableError(problem, reason="rank_failed"))

    def _explained(self, command: Command, error: BaseException) -> OutriderError:
        """Return the error to report when rank 0 fails during a command.

        The usual cause of a failed collective is a lost rank. This method first waits until the beats show
        whether and which rank is lost.
        """
        self._noticed.wait(NOTICE_S)
        for _ in range(QUIET_BEATS):
            if not self._undecided() or self._noticed.wait(BEAT_S):
                break
        text = str(error)
        if isinstance(error, DistError) or _LIBRARY_PLACE.match(text):
            _log.warning("collective failed", command=type(command).__name__, error=text)
            text = "the ranks did not compute it together in time"
        return self._blame() or UnavailableError(
            f"tp: rank 0 failed in {type(command).__name__}: {text}", reason="rank_failed"
        )

    def _undecided(self) -> bool:
        """Return True if a rank's beat is late, but not late enough to call the rank silent."""
        return any(1 < beats < QUIET_BEATS for beats in self._silent.values())

    def _blame(self) -> OutriderError | None:
        """Return an error that names the silent ranks, or None if there are none."""
        ranks = [rank for rank, beats in self._silent.items() if beats >= QUIET_BEATS]
        return _silent(ranks, min(self._silent[rank] for rank in ranks)) if ranks else None


def _silent(ranks: Sequence[int], beats: int) -> UnavailableError:
    if len(ranks) == 1:
        return _lost(ranks[0], f"it has been silent for {beats} beats")
    names = ", ".join(map(str, ranks))
    problem = (
        f"tp: ranks {names} are lost: they have been silent for {beats} beats. "
        "See their output for the reason; start the target again."
    )
    return UnavailableError(problem, reason="rank_lost")


def _lost(rank: int, how: str) -> UnavailableError:
    return UnavailableError(
        f"tp: rank {rank} is lost: {how}. See its output for the reason; start the target again.",
        reason="rank_lost",
    )
