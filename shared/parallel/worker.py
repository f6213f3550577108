"""Ranks 1 and up: the loop that receives rank 0's commands and runs them in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.base.errors import OutriderError
from outrider.shared.kv.pool import KVPool
from outrider.shared.obs.logging import get_logger
from outrider.shared.parallel.channel import RankConnection, RankReport, ReportKind
from outrider.shared.parallel.collectives import missed
from outrider.shared.parallel.commands import (
    Command,
    Compact,
    Drop,
    Forget,
    Forward,
    GraphRecorded,
    Logits,
    MakePool,
    Record,
    Replay,
    Scrub,
    Stop,
    decode,
)
from outrider.shared.parallel.decoder import ShardedDecoder
from outrider.shared.parallel.packing import StepInputs, TensorPart, packed_words, unpack, words_of

_log = get_logger("outrider.parallel")


@dataclass(frozen=True, slots=True)
class _Step:
    """The last forward pass, to which `Logits` and `Compact` refer."""

    hidden: torch.Tensor
    batch: AttentionBatch


class RankLost(Exception):
    """The connection to rank 0 is closed."""


class Worker:
    """Runs rank 0's commands on another rank, until the `Stop` command.

    Args:
        decoder: This rank's share of the decoder.
        attention: Attention backend, used by this worker alone.
        connection: Connection to rank 0.
    """

    def __init__(
        self, decoder: ShardedDecoder, attention: AttentionBackend, connection: RankConnection
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._connection = connection
        self._pool: KVPool | None = None
        self._step: _Step | None = None
        self._graphs = _Graphs(decoder.device)

    @torch.inference_mode()
    def run(self) -> None:
        """Run commands until rank 0 sends `Stop`.

        Raises:
            RankLost: Rank 0 is gone.
            OutriderError: A command failed. Rank 0 has been notified.
        """
        try:
            while not isinstance(command := self._next(), Stop):
                self._execute(command)
            self._graphs.clear()  # NCCL cannot destroy a process group that a graph still uses.
        except RankLost:
            raise
        except Exception as error:
            report_failure(self._connection, error)
            raise

    def _next(self) -> Command:
        body = self._connection.receive()
        if body is None:
            raise RankLost
        return decode(body)

    def _execute(self, command: Command) -> None:
        match command:
            case Forward():
                self._forward(command)
            case Logits():
                self._logits(command)
            case Compact():
                self._compact(command)
            case Replay(graph):
                self._graphs.replay(graph)
            case Record(graph):
                self._graphs.record(graph, self._run_until_recorded)
            case Scrub(num_pages):
                pages = self._received(torch.empty(num_pages, dtype=torch.int64, device=self._decoder.device))
                self._require_pool().scrub(pages)
                if self._decoder.collectives.lost():
                    raise missed(self._decoder.collectives.rank)
            case MakePool(num_pages, page_size):
                self._pool = self._decoder.make_pool(num_pages, page_size)
                self._connection.report(RankReport(ReportKind.DONE, "pool"))
            case Drop(graph):
                self._graphs.drop(graph)
            case Forget():
                self._graphs.clear()
            case GraphRecorded() | Stop():
                raise AssertionError(f"{command} out of place")

    def _run_until_recorded(self) -> int:
        """Run the commands of a capture. Return the number of commands."""
        count = 0
        while not isinstance(command := self._next(), GraphRecorded):
            self._execute(command)
            count += 1
        return count

    def _forward(self, command: Forward) -> None:
        buffer = self._received(
            torch.empty(packed_words(command), dtype=torch.int32, device=self._decoder.device)
        )
        inputs = StepInputs.unpack(buffer, command)
        self._attention.plan(inputs.batch)
        output = self._decoder.forward(inputs.tokens, inputs.positions, self._attention, self._require_pool())
        self._step = _Step(output.hidden, inputs.batch)

    def _logits(self, command: Logits) -> None:
        decoder = self._decoder
        if command.rows:
            hidden = self._received(
                torch.empty(
                    command.rows, decoder.config.hidden_size, dtype=decoder.dtype, device=decoder.device
                )
            )
        else:
            assert self._step is not None
            hidden = self._step.hidden
        decoder.collectives.gather(
            decoder.best(hidden) if command.best_only else decoder.sent_columns(hidden)
        )

    def _compact(self, command: Compact) -> None:
        bs = command.bs
        layout: list[TensorPart] = [((bs, command.width), torch.int32), ((bs,), torch.int32)]
        if command.has_table_rows:
            layout.append(((bs,), torch.int32))
        if command.max_pages:
            layout += [((command.tables, command.max_pages), torch.int32), ((bs,), torch.int32)]
        buffer = torch.empty(words_of(layout), dtype=torch.int32, device=self._decoder.device)
        path, num_accepted, *parts = unpack(self._received(buffer), layout)
        table_rows = parts.pop(0) if command.has_table_rows else None
        if command.max_pages:
            page_table, cached_lens = parts
        else:
            assert self._step is not None
            page_table, cached_lens = self._step.batch.page_table, self._step.batch.prefix_lens
        self._require_pool().compact(page_table, cached_lens, path, num_accepted, table_rows)

    def _received(self, tensor: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with rank 0's next broadcast and return it."""
        self._decoder.collectives.broadcast(tensor)
        return tensor

    def _require_pool(self) -> KVPool:
        assert self._pool is not None, "MakePool comes first"
        return self._pool


class _Graphs:
    """This rank's CUDA graphs by the numbers that rank 0 assigned. All graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._pool: Any = None

    def record(self, number: int, run: Callable[[], int]) -> None:
        """Capture `run` into a graph. If `run` executes no commands, store None instead of a graph."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            count = run()
        self._graphs[number] = graph if count else None

    def replay(self, number: int) -> None:
        """Launch a graph, unless it is empty."""
        graph = self._graphs[number]
        if graph is not None:
            graph.replay()

    def drop(self, number: int) -> None:
        """Drop one graph. Later graphs reuse its memory."""
        if self._graphs[number] is not None:
            torch.cuda.synchronize(self._device)
        del self._graphs[number]
        if not any(self._graphs.values()):
            self._pool = None  # torch frees a pool together with its last graph.

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._pool = None


def report_failure(connection: RankConnection, error: Exception) -> None:
    """Log why this rank fails and report it to rank 0, if rank 0 is still there."""
    text = error.message if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
    _log.error("rank failed", error=text)
    with contextlib.suppress(OSError):  # Rank 0 will notice the closed connection.
        connection.report(RankReport(ReportKind.FAILED, text))
