"""Enqueues rounds over packed rows, as CUDA graphs where possible, and reads their results.

A round consists of pieces, each of which is a CUDA graph where possible:

    draft, once per tree shape | verify: locate rows, forward, choose, accept, compact, features, post result

`services.target.drafting` enqueues the draft pieces, and this module enqueues the verify piece. Graphs of the
verify piece are keyed by the number of packed rows, the class of the widest tree, the sampling mode, and
whether features are stored. All mixtures of requests therefore share a few graphs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from outrider.kernels.token_logprobs import WORDS
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import (
    Entry,
    PackedBatch,
    RowBuckets,
    SamplingMode,
    width_class,
)
from outrider.services.target.model.result_ring import ResultRing
from outrider.services.target.model.scores import unpack_logprobs
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.model.token_states import RoundTap, tapped
from outrider.services.target.model.tree_forms import Masks, TreeForms
from outrider.services.target.model.verify_pass import PassSize, verify_pass
from outrider.shared.base.generation import TraceNode
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates
from outrider.shared.nn.layers.routes import recording_routes

MOST_PADDING = 4
"""A round may replay the graph of a larger round that has at most this multiple of the round's own rows."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Times at three moments of a round: its start, the end of drafting, and its end.

    Drafting includes the drafter's work on earlier tokens. A round without drafts starts with its verify
    pass.

    On a GPU, the times are CUDA events. On a CPU, they are seconds of `time.monotonic`.
    """

    begun: float | torch.cuda.Event
    drafted: float | torch.cuda.Event
    verified: float | torch.cuda.Event

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of drafting and of verifying. The round must have ended."""
        return _between(self.begun, self.drafted), _between(self.drafted, self.verified)


@dataclass(frozen=True, slots=True)
class Round:
    """A round that was enqueued but not read yet.

    Attributes:
        number: The number of the round.
        entries: The sequences, in the order of the results.
        starts: First packed row of each entry.
        launched_at: Time of the launch, from `time.monotonic`.
        result: ``[B, 2 + 2 R] int32`` in host memory.
        nodes: ``[4, M] int32`` in host memory: tokens, parents, depths and log-probabilities of the trees.
            None if no client wants a trace.
        marks: Times of the round.
        provisional: True if a piece of the round ran without a graph, so that later rounds of the same size
            probably take less time.
        logprobs: ``[M, WORDS] int32`` in host memory, as in `PassResult`. None if no client wants logprobs.
        tap: States of tokens and logprobs of named tokens. None if no client wants them.
    """

    number: int
    entries: Seq[Entry]
    starts: Seq[int]
    launched_at: float
    result: torch.Tensor
    nodes: torch.Tensor | None
    marks: Marks
    provisional: bool = False
    logprobs: torch.Tensor | None = None
    tap: RoundTap | None = None

    def logprobs_of(self, index: int, count: int) -> list[TokenLogprob]:
        """Return the logprobs of the first `count` tokens that the round chose for an entry."""
        top = self.entries[index].sequence.request.logprobs.top
        if top is None:
            return []
        assert self.logprobs is not None, "the round was launched without logprobs"
        start = self.starts[index]
        requested = self.tap.requested_of(index, count) if self.tap is not None else None
        return unpack_logprobs(self.logprobs[start : start + count], top, requested)

    def states_of(self, index: int, first: int, count: int) -> TokenStates | None:
        """Return the states behind the first `count` tokens of an entry, whose root has the index `first`."""
        return self.tap.states_of(index, first, count) if self.tap is not None else None

    def trace_of(self, index: int, num_nodes: int) -> list[TraceNode]:
        """Return the tree of an entry for the client. Requires `nodes`."""
        assert self.nodes is not None, "the round was launched without a trace"
        start = self.starts[index]
        part = self.nodes[:, start : start + num_nodes]
        tokens, parents, depths = part[:3].tolist()
        logprobs = part[3].view(torch.float32).tolist()
        return [TraceNode(*node) for node in zip(tokens, parents, depths, logprobs, strict=True)]


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """The result of a round on the host.

    Attributes:
        round: The round.
        outcomes: One outcome per entry. The outcome is None for an entry whose slot was idle.
        seconds: Time from the end of the previous round, or from the launch if the launch was later.
        draft_s, verify_s: Seconds of drafting and of verifying.
    """

    round: Round
    outcomes: list[Outcome | None]
    seconds: float
    draft_s: float
    verify_s: float


class RoundRunner:
    """Enqueues and reads rounds. Engine thread only, under inference mode.

    Args:
        runner: The model.
        slots: Number of slots.
        columns: R, the largest number of tokens that a round may choose for a sequence.
        max_nodes: Largest number of nodes of a tree.
        max_rows: Largest number of packed rows of a round.
        pages: Columns of the page table.
        recorded_entries: Largest number of entries of a round that is recorded. None records rounds of all
            slots.

    Attributes:
        table: The slots.
        buckets: Numbers of packed rows to which rounds are padded.
        batch: Entries and trees of the rounds.
        recorded_entries: Largest number of entries of a round, or of one of its drafts, that is recorded.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        slots: int,
        columns: int,
        max_nodes: int,
        max_rows: int,
        pages: int,
        recorded_entries: int | None = None,
    ) -> None:
        self.table = SlotTable(slots, columns, runner.pool, pages, runner.decoder.config.vocab_size)
        runner.use_slots(self.table)
        self.buckets = RowBuckets.up_to(max_rows)
        self.batch = PackedBatch(max_rows, slots, columns, max_nodes, runner.device)
        self._forms = TreeForms(self.batch, runner.decoder.config.vocab_size)
        self._runner = runner
        self._graphs = runner.graphs
        self.recorded_entries = slots if recorded_entries is None else recorded_entries
        self._rings: dict[tuple[str, int, int], ResultRing] = {}
        self._last_read = 0.0
        self._begun: float | torch.cuda.Event | None = None
        self._count = 0

    @property
    def max_rows(self) -> int:
        """Largest number of packed rows of a round."""
        return self.batch.rows

    def resize_features(self) -> None:
        """Follow a change of the pool's feature size."""
        self.table.resize_features()

    def size_of(self, entries: Seq[Entry]) -> PassSize:
        """Return the size of the verify pass of these entries."""
        rows = self.buckets.size_for(sum(entry.rows for entry in entries))
        return PassSize(
            rows,
            width_class(max(entry.rows for entry in entries)),
            SamplingMode.of([entry.sequence for entry in entries]),
            self._runner.captures and any(entry.sequence.has_features for entry in entries),
        )

    def replays(self, entries: Seq[Entry]) -> bool:
        """Return True if the verify pass of these entries is a recorded graph, or if graphs are disabled."""
        if any(entry.sequence.form is not None for entry in entries) or tapped(entries):
            return not self._graphs.enabled
        size = self._recorded_size(self.size_of(entries))
        return not self._graphs.enabled or (size is not None and len(entries) <= self.recorded_entries)

    def begin(self) -> None:
        """Mark the start of the next round, before its drafts are prepared."""
        self._begun = self._mark()

    @torch.inference_mode()
    def launch(self, entries: Seq[Entry], draft: Callable[[], None] | None) -> Round:
        """Enqueue a round.

        Args:
            entries: The sequences. Their slots and pages must have been written to the slot table.
            draft: Enqueues the drafts, which write their trees to `PackedBatch.trees`. None without drafts.
        """
        launched_at, size, graphs = time.monotonic(), self.size_of(entries), self._graphs
        formed = any(entry.sequence.form is not None for entry in entries)
        recorded = len(entries) <= self.recorded_entries and not formed and not tapped(entries)
        provisional_runs = graphs.provisional_runs
        if recorded:
            if graphs.due(self._key(size)) and not graphs.holds(self._key(size)):
                self.capture(size)  # before the entries are loaded, because a recording runs the pass
            size = self._recorded_size(size) or size
        key = self._key(size)
        self.table.flush()
        self.batch.load(entries, size.rows)
        begun, self._begun = self._begun, None
        if draft is not None:
            draft()
        starts = [0, *accumulate(entry.rows for entry in entries)][: len(entries)]
        # The host needs the drafted trees to find the tokens that a form allows.
        allowed = self._forms.fit(entries, starts, size.rows) if formed else None
        tap = RoundTap.of(entries, starts)
        drafted = self._mark()
        if draft is None or begun is None:
            begun = drafted
        if not recorded:
            self._verify(size, allowed, tap)
        elif graphs.replays(key):
            graphs.run(key, lambda: self._verify(size))
        else:
            graphs.run_eagerly(key, lambda: self._verify(size))
        traced = any(entry.sequence.request.speculation.trace for entry in entries)
        nodes = self._post_nodes(size.rows) if traced else None
        scored = size.mode is SamplingMode.FULL
        self._count += 1
        result = self._ring(size.rows).take()
        logprobs = self._logprobs_ring(size.rows).take() if scored else None
        marks = Marks(begun, drafted, self._mark())
        provisional = formed or tap is not None or graphs.provisional_runs > provisional_runs
        return Round(
            self._count, tuple(entries), starts, launched_at, result, nodes, marks, provisional, logprobs, tap
        )

    def read(self, launched: Round) -> FinishedRound:
        """Wait for a round and return its result."""
        end = launched.marks.verified
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        outcomes = unpack(launched.result[: len(launched.entries)].tolist())
        now = time.monotonic()
        seconds = now - max(launched.launched_at, self._last_read)
        self._last_read = now
        draft_s, verify_s = launched.marks.seconds()
        return FinishedRound(launched, outcomes, seconds, draft_s, verify_s)

    @torch.inference_mode()
    def capture(self, size: PassSize) -> None:
        """Record the verify pass of one size before it is needed, with idle rows."""
        self.batch.make_idle(size.rows)
        self._graphs.capture(self._key(size), lambda: self._verify(size))
        self._ring(size.rows).recorded()
        if size.mode is SamplingMode.FULL:
            self._logprobs_ring(size.rows).recorded()

    def _recorded_size(self, size: PassSize) -> PassSize | None:
        """Return the smallest recorded size that serves rounds of this size, or None if there is none.

        Running idle rows as padding takes less time than launching the kernels of a round one by one.
        """
        sizes = self.buckets.sizes
        for rows in sizes[bisect_left(sizes, size.rows) :]:
            if rows > MOST_PADDING * size.rows or not self._graphs.enabled:
                return None
            if self._graphs.replays(self._key(padded := replace(size, rows=rows))):
                return padded
        return None

    def _verify(self, size: PassSize, allowed: Masks | None = None, tap: RoundTap | None = None) -> None:
        model = self._runner.step_model(size.capture)
        with recording_routes(tap is not None and tap.wants_experts) as routes:
            result = verify_pass(model, self.table, self.batch, size, allowed)
        if tap is not None:
            tap.take(model.decoder, result, routes)
        self._ring(size.rows).post(result.packed)
        if result.logprobs is not None:
            self._logprobs_ring(size.rows).post(result.logprobs)

    def _post_nodes(self, rows: int) -> torch.Tensor:
        ring = self._ring_of("nodes", 4, self.max_rows)
        ring.post(self.batch.nodes)
        return ring.take()

    def _ring(self, rows: int) -> ResultRing:
        return self._ring_of("result", self.batch.results(rows), 2 + 2 * self.table.columns)

    def _logprobs_ring(self, rows: int) -> ResultRing:
        return self._ring_of("logprobs", rows, WORDS)

    def _ring_of(self, content: str, rows: int, columns: int) -> ResultRing:
        key = content, rows, columns
        if key not in self._rings:
            self._rings[key] = ResultRing(rows, columns, self._runner.device)
        return self._rings[key]

    def _mark(self) -> float | torch.cuda.Event:
        if self._runner.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def _key(size: PassSize) -> GraphKey:
        return GraphKey(
            "verify",
            size.rows,
            width=size.width,
            mode=size.mode,
            capture=size.capture,
            draft_dependent=size.capture,
        )


def unpack(rows: list[list[int]]) -> list[Outcome | None]:
    """Decode the result of `verify_pass` into one outcome per row. The outcome of an idle row is None."""
    if not rows:
        return []
    columns = (len(rows[0]) - 2) // 2
    return [
        None
        if accepted < 0
        else Outcome(num_nodes, rest[1 : 1 + accepted], rest[columns : columns + accepted + 1])
        for accepted, num_nodes, *rest in rows
    ]


def _between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return float(first.elapsed_time(second)) / 1e3
    assert isinstance(first, float)
    assert isinstance(second, float)
    return second - first
