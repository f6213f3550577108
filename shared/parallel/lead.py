"""Rank 0: the decoder that the engine sees. What it is asked for, the other ranks are told first, so that all compute together."""

from __future__ import annotations

import contextlib
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.distributed import DistError

from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.base.errors import OutriderError, UnavailableError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import LM_HEAD, Decoder, DecoderOutput
from outrider.shared.obs.logging import get_logger
from outrider.shared.parallel.channel import BEAT_S, Connection, ReportKind
from outrider.shared.parallel.collectives import missed
from outrider.shared.parallel.commands import (
    Command,
    Compact,
    Drop,
    Forget,
    Logits,
    MakePool,
    Record,
    Recorded,
    Replay,
    Scrub,
    Stop,
    encode,
)
from outrider.shared.parallel.decoder import HeadReader, ShardedDecoder, best_of
from outrider.shared.parallel.packing import StepInputs, pack

SILENT_BEATS = 15
"""A rank from which nothing came for so many beats is stopped or cut off."""
QUIET_BEATS = 3
"""So many are enough to name it when something went wrong anyway."""
POOL_TIMEOUT_S = 120.0
NOTICE_S = 1.0

_LIBRARY_PLACE = re.compile(r"\[[^\]]*\.(cc|cpp|h|hpp|cu):\d+\]")
_log = get_logger("outrider.parallel")

FailureHandler = Callable[[OutriderError], None]


class Lead:
    """The other ranks as rank 0 sees them: commands go out in order, and the first sign of a death ends the group for good.

    Args:
        connections: One per rank from 1 on.
        on_failure: Called once, from the thread that notices, when a rank is lost or did not keep step. Nothing can be computed afterwards,
            and a collective that is under way may never return: the process has to end.
        step_timeout_s: The longest that a step (see `step`) may take between two commands; without end by default.
        bounded: Whether the collectives under way in `together` end by themselves, as gloo's do. NCCL's in a CUDA graph wait for ever.
    """

    def __init__(
        self,
        connections: Mapping[int, Connection],
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
        """Tell all ranks.

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
        """Tell all ranks a command and take this rank's part in it; an error in the middle of it leaves the ranks out of step for good."""
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
        """Watch what is done in it, by one thread at a time: when it does not come back, the group has failed.

        A host that waits for the device cannot be woken, so the one who fails the group here is the thread that counts beats.
        """
        self._step_beats = 0
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def wait_done(self, timeout_s: float) -> dict[int, str]:
        """Wait until every rank has reported what it was told to do; returns the texts by rank.

        Raises:
            OutriderError: A rank failed, or did not report in time.
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
        """Note that the group is broken, tell the handler, and return the error (the first one, if there was one)."""
        with self._lock:
            if self.failure is not None or self._closing:
                return self.failure or error
            self.failure = error
        self._noticed.set()
        _log.error("tensor parallel group failed", error=error.message)
        self._on_failure(error)
        return error

    def close(self) -> None:
        """Let the other ranks end."""
        if self._in_step:  # nobody will see it end, and this process could not either
            self.fail(
                UnavailableError(
                    "tp: told to end in the middle of a step that does not come back.", reason="rank_failed"
                )
            )
        with self._lock:
            self._closing = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it has ended already
                connection.send(encode(Stop()))
            connection.close()

    def _listen(self, rank: int) -> None:
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
        """Count beats of this process, not seconds: while it stands still itself, nobody is to blame."""
        while self.failure is None and not self._closing:
            time.sleep(BEAT_S)
            for rank in self._silent:
                self._silent[rank] += 1
                if self._silent[rank] > SILENT_BEATS:
                    self.fail(_silent([rank], SILENT_BEATS))
            if self._in_step and not (self._together and self._bounded):
                self._step_beats += 1
                if self._step_beats * BEAT_S > self._step_timeout_s and not self._undecided():
                    problem = f"tp: a step has not come back for {self._step_timeout_s:g} s, and all ranks run; start the target again."
                    self.fail(self._blame() or UnavailableError(problem, reason="rank_failed"))

    def _explained(self, command: Command, error: BaseException) -> OutriderError:
        """Say who is to blame for an error of rank 0 in the middle of a command; a collective fails because a rank is lost."""
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
        """Whether a rank is late with its beat, and not late enough to be called silent."""
        return any(1 < beats < QUIET_BEATS for beats in self._silent.values())

    def _blame(self) -> OutriderError | None:
        ranks = [rank for rank, beats in self._silent.items() if beats >= QUIET_BEATS]
        return _silent(ranks, min(self._silent[rank] for rank in ranks)) if ranks else None


class LeadDecoder(ShardedDecoder):
    """Rank 0's `ShardedDecoder`, to be used like any other `Decoder`, by one thread at a time. `connect` comes first.

    It is also the observer of the engine's CUDA graphs: the other ranks record and replay theirs in step.
    """

    _lead: Lead
    _read_head: HeadReader | None = None
    _last: tuple[torch.Tensor, AttentionBatch] | None = None

    def connect(self, lead: Lead, read_head: HeadReader) -> None:
        """Take the lead of the other ranks; `read_head` reads the output head for drafts that borrow it."""
        self._lead = lead
        self._read_head = read_head

    @property
    def failure(self) -> OutriderError | None:
        """Why the group is broken, if it is."""
        return self._lead.failure

    def make_pool(self, num_pages: int, page_size: int, feature_size: int = 0) -> KVPool:
        """Make the pool on every rank; feature rows live on rank 0.

        Raises:
            ConfigurationError: Rank 0 has not enough memory.
            OutriderError: Another rank has not.
        """
        pool = self._pool_of(SpreadPool, num_pages, page_size, feature_size)
        pool.lead_by(self)
        self._lead.send(MakePool(num_pages, page_size))
        self._lead.wait_done(POOL_TIMEOUT_S)
        return pool

    def weight(self, name: str) -> torch.Tensor:
        """See `Decoder.weight`; the output head is read anew, since no rank holds it whole."""
        if name == LM_HEAD and not self.config.tie_word_embeddings:
            assert self._read_head is not None
            return self._read_head()
        return self.embedding if name == LM_HEAD else super().weight(name)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
        aux_layer_ids: Sequence[int] = (),
    ) -> DecoderOutput:
        """See `Decoder.forward`."""
        batch = attention.batch
        assert batch is not None, "plan() comes before forward()"
        inputs = StepInputs(tokens, positions, batch)
        with self._lead.together(inputs.command()):
            self.collectives.broadcast(inputs.pack())
            output = super().forward(tokens, positions, attention, pool, aux_layer_ids)
        self._last = output.hidden, batch
        return output

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab]`` for hidden rows after the final norm, gathered from all ranks."""
        with self._together_on(hidden, best_only=False):
            gathered = self.collectives.gather(self.sent_columns(hidden))
        assert gathered is not None
        return gathered.transpose(0, 1).reshape(hidden.shape[0], -1)[:, : self.config.vocab_size].contiguous()

    @torch.inference_mode()
    def choose(
        self, hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """See `Decoder.choose`; greedy rows gather a value and an id per rank instead of the vocabulary."""
        if not sampling.all_greedy:
            return choose_tokens(self.logits(hidden), sampling, positions)
        with self._together_on(hidden, best_only=True):
            gathered = self.collectives.gather(self.best(hidden))  # [ranks, rows, 2]
        assert gathered is not None
        return best_of(gathered)

    def spread_compact(
        self,
        page_table: torch.Tensor,
        cached_lens: torch.Tensor,
        path: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        """Tell the other ranks to compact their planes."""
        batch = None if self._last is None else self._last[1]
        known = batch is not None and page_table is batch.page_table and cached_lens is batch.prefix_lens
        more = [] if known else [page_table, cached_lens]
        bs, width = path.shape
        with self._lead.together(Compact(bs, width, 0 if known else page_table.shape[1])):
            self.collectives.broadcast(pack([path, num_accepted, *more]))

    def spread_scrub(self, pages: torch.Tensor) -> None:
        """Tell the other ranks to zero pages: a model that gives no numbers, or a rank that did not send any, which ends the group."""
        if self.collectives.lost():
            raise self._lead.fail(missed(0))
        with self._lead.together(Scrub(pages.shape[0])):
            self.collectives.broadcast(pages.to(torch.int64, copy=True))

    def watched(self) -> AbstractContextManager[None]:
        """See `Lead.step`."""
        return self._lead.step()

    def recording(self, graph: int) -> None:
        """See `GraphObserver.recording`."""
        self._lead.send(Record(graph))

    def recorded(self, graph: int) -> None:
        """See `GraphObserver.recorded`."""
        self._lead.send(Recorded(graph))

    def replaying(self, graph: int) -> None:
        """See `GraphObserver.replaying`."""
        self._lead.send(Replay(graph))

    def dropped(self, graph: int) -> None:
        """See `GraphObserver.dropped`."""
        self._lead.send(Drop(graph))

    def forgotten(self) -> None:
        """See `GraphObserver.forgotten`."""
        self._lead.send(Forget())

    @contextmanager
    def _together_on(self, hidden: torch.Tensor, best_only: bool) -> Iterator[None]:
        """Tell the other ranks to compute columns of these rows, which they have when they are the last forward pass's, all of them."""
        known = self._last is not None and hidden is self._last[0]
        with self._lead.together(Logits(0 if known else hidden.shape[0], int(best_only))):
            if not known:
                self.collectives.broadcast(hidden.contiguous())
            yield


class SpreadPool(KVPool):
    """Rank 0's part of a pool whose planes lie on all ranks: what moves rows here moves them there."""

    _decoder: LeadDecoder

    def lead_by(self, decoder: LeadDecoder) -> None:
        """Take the decoder that tells the other ranks."""
        self._decoder = decoder

    def compact(
        self,
        page_table: torch.Tensor,
        cached_lens: torch.Tensor,
        path: torch.Tensor,
        num_accepted: torch.Tensor,
    ) -> None:
        """See `KVPool.compact`."""
        self._decoder.spread_compact(page_table, cached_lens, path, num_accepted)
        super().compact(page_table, cached_lens, path, num_accepted)

    def scrub(self, pages: torch.Tensor) -> None:
        """See `KVPool.scrub`."""
        self._decoder.spread_scrub(pages)
        super().scrub(pages)


def graph_observer(decoder: Decoder) -> LeadDecoder | None:
    """Return who must hear of the CUDA graphs that this decoder's calls are recorded into, if anybody."""
    return decoder if isinstance(decoder, LeadDecoder) else None


def _silent(ranks: Sequence[int], beats: int) -> UnavailableError:
    if len(ranks) == 1:
        return _lost(ranks[0], f"it has been silent for {beats} beats")
    names = ", ".join(map(str, ranks))
    problem = f"tp: ranks {names} are lost: they have been silent for {beats} beats. Their own output says why; start the target again."
    return UnavailableError(problem, reason="rank_lost")


def _lost(rank: int, how: str) -> UnavailableError:
    return UnavailableError(
        f"tp: rank {rank} is lost: {how}. Its own output says why; start the target again.",
        reason="rank_lost",
    )
