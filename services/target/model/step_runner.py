"""Enqueues rounds over packed rows, as CUDA graphs where possible, and reads their results.

A round consists of pieces:

    draft, once per tree shape | verify: locate rows, forward, choose, accept, compact, features, post result

If some outputs have forms, i.e. constraints on their tokens, the verify piece is cut in two before the choice
of tokens. The host can find the allowed tokens only when it knows all earlier tokens. `launch` then returns
a `PendingVerify`. `complete` enqueues the rest once the host has read all earlier rounds:

    device    | choose n | forward n + 1           | choose n + 1 | forward n + 2 …
    host        launch n + 1 · read n · masks of n + 1 · deliver n · launch n + 2 …

`services.target.drafting` enqueues the draft pieces, and this module enqueues the verify piece. Graphs of the
verify piece are keyed by the number of packed rows, the class of the widest tree, the sampling mode, and
whether feature rows are stored. All mixtures of requests therefore share a few graphs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate

import torch

from outrider.kernels.token_logprobs import WORDS
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.packed_batch import (
    Entry,
    PackedBatch,
    SamplingMode,
    width_class,
)
from outrider.services.target.model.result_ring import ResultRing
from outrider.services.target.model.rounds import (
    Marks,
    Moment,
    PendingVerify,
    Round,
    StepOutput,
    unpack_outcomes,
)
from outrider.services.target.model.slot_table import SlotTable
from outrider.services.target.model.token_states import AcceptedPathTap
from outrider.services.target.model.tree_forms import TreeForms
from outrider.services.target.model.verify_pass import (
    PassResult,
    PassSize,
    choose_pass,
    forward_pass,
    verify_pass,
)
from outrider.shared.engine.buckets import padded_size, row_buckets
from outrider.shared.engine.recorded_graph import Parts, finish_parts

MOST_PADDING = 4
"""A round may replay the graph of a larger round that has at most this multiple of the round's own rows."""


class StepRunner:
    """Enqueues rounds over packed rows, and reads their results. Engine thread only, under inference mode.

    Args:
        runner: The target's model and KV pool.
        slots: Number of slots.
        columns: R, the largest number of tokens that a round may choose for a sequence.
        max_nodes: Largest number of nodes of a tree.
        max_rows: Largest number of packed rows of a round.
        pages: Number of columns of the page table.
        recorded_entries: Largest number of entries of a recorded round. None sets no limit.

    Attributes:
        table: The slots.
        buckets: Numbers of packed rows to which rounds are padded.
        batch: Entries and trees of the rounds.
        recorded_entries: Largest number of entries of a recorded round.
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
        self.buckets = row_buckets(max_rows)
        self.batch = PackedBatch(max_rows, slots, columns, max_nodes, runner.device)
        self._forms = TreeForms(self.batch, runner.decoder.config.vocab_size)
        self._runner = runner
        self._graphs = runner.graphs
        self.recorded_entries = slots if recorded_entries is None else recorded_entries
        self._rings: dict[tuple[str, int, int], ResultRing] = {}
        self._last_read = 0.0
        self._begun: Moment | None = None
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
        rows = padded_size(self.buckets, sum(entry.rows for entry in entries))
        return PassSize(
            rows,
            width_class(max(entry.rows for entry in entries)),
            SamplingMode.of([entry.sequence for entry in entries]),
            self._runner.captures and any(entry.sequence.has_features for entry in entries),
            any(entry.sequence.form is not None for entry in entries),
        )

    def replays(self, entries: Seq[Entry]) -> bool:
        """Return True if the verify pass of these entries is a recorded graph, or if graphs are disabled."""
        size = self._recorded_size(self.size_of(entries))
        return not self._graphs.enabled or (size is not None and len(entries) <= self.recorded_entries)

    def begin(self) -> None:
        """Mark the start of the next round, before its drafts are prepared."""
        self._begun = self._mark()

    @torch.inference_mode()
    def launch(self, entries: Seq[Entry], draft: Callable[[], None] | None) -> Round | PendingVerify:
        """Enqueue a round.

        Args:
            entries: The sequences of the round. Their slots and pages must have been written to the slot
                table.
            draft: Function that enqueues the drafting, which writes the trees to `PackedBatch.trees`. None if
                no entry drafts.

        Returns:
            The round. If the output of an entry is constrained, the round is a `PendingVerify`. Pass it to
            `complete` before anything else is launched.
        """
        launched_at, size, graphs = time.monotonic(), self.size_of(entries), self._graphs
        recorded = len(entries) <= self.recorded_entries and self._records(size)
        provisional_runs = graphs.provisional_runs
        if size.masked:
            self._forms.allocate()
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
        self._count += 1
        opened = PendingVerify(
            self._count,
            tuple(entries),
            starts,
            launched_at,
            size,
            None if draft is None else begun,
            provisional_runs,
            AcceptedPathTap.of(entries, starts),
        )
        if size.masked:
            parts = self._parts(size)
            opened.work = graphs.run_parts(key, lambda: parts) if recorded else parts
            # Trees of outputs with forms are changed before the forward pass.
            if any(entry.sequence.form is not None and entry.shape.drafts for entry in entries):
                self._forms.fetch()
            else:
                self._forward(opened)
            return opened
        opened.drafted = self._mark()
        run = graphs.run if graphs.replays(key) else graphs.run_eagerly
        result = run(key, lambda: self._verify(size)) if recorded else self._verify(size)
        return self._closed(opened, result)

    @torch.inference_mode()
    def complete(self, opened: PendingVerify) -> Round:
        """Enqueue the rest of a pending round. The host must have read earlier rounds and first tokens."""
        formed = self._forms.fit(opened.entries, opened.starts)
        if opened.drafted is None:
            self._forward(opened)
        self._forms.fill(formed)
        result = finish_parts(self._work(opened))
        assert result is not None, "a verify pass has a result"
        return self._closed(opened, result)

    def read(self, launched: Round) -> StepOutput:
        """Wait for a round and return its result."""
        end = launched.marks.verified
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        outcomes = unpack_outcomes(launched.result[: len(launched.entries)].tolist())
        now = time.monotonic()
        seconds = now - max(launched.launched_at, self._last_read)
        self._last_read = now
        draft_s, verify_s = launched.marks.seconds()
        return StepOutput(launched, outcomes, seconds, draft_s, verify_s)

    @torch.inference_mode()
    def capture(self, size: PassSize) -> None:
        """Record the verify pass of one size before it is needed, with idle rows."""
        self.batch.make_idle(size.rows)
        if size.masked:
            self._graphs.capture_parts(self._key(size), lambda: self._parts(size))
        else:
            self._graphs.capture(self._key(size), lambda: self._verify(size))
        self._ring(size.rows).recorded()
        if size.mode is SamplingMode.FULL:
            self._logprobs_ring(size.rows).recorded()

    def _recorded_size(self, size: PassSize) -> PassSize | None:
        """Return the smallest recorded size that serves rounds of this size, or None if there is none.

        Running idle rows as padding takes less time than launching the kernels of a round one by one.
        """
        for rows in self.buckets[bisect_left(self.buckets, size.rows) :]:
            if rows > MOST_PADDING * size.rows or not self._graphs.enabled:
                return None
            if self._graphs.replays(self._key(padded := replace(size, rows=rows))):
                return padded
        return None

    def _records(self, size: PassSize) -> bool:
        """Return True if the verify pass of this size may be recorded."""
        # Several ranks have not been tried with passes in two parts.
        return not (size.masked and self._graphs.observed)

    def _verify(self, size: PassSize) -> PassResult:
        model = self._runner.step_model(size.capture)
        return self._posted(size, verify_pass(model, self.table, self.batch, size))

    def _parts(self, size: PassSize) -> Parts[PassResult]:
        """Run a verify pass with masks in two parts."""
        model, allowed = self._runner.step_model(size.capture), self._forms.masks(size.rows)
        forward = forward_pass(model, self.table, self.batch, size)
        yield
        return self._posted(size, choose_pass(model, self.table, self.batch, size, forward, allowed))

    def _forward(self, opened: PendingVerify) -> None:
        """Enqueue the forward pass of a pending round."""
        opened.drafted = self._mark()
        next(self._work(opened))

    @staticmethod
    def _work(opened: PendingVerify) -> Parts[PassResult]:
        assert opened.work is not None, "the round has no forms"
        return opened.work

    def _posted(self, size: PassSize, result: PassResult) -> PassResult:
        """Post the result to the host, and return what later work may still read."""
        self._ring(size.rows).post(result.packed)
        if result.logprobs is not None:
            self._logprobs_ring(size.rows).post(result.logprobs)
        return result.until_next_run()

    def _closed(self, opened: PendingVerify, result: PassResult) -> Round:
        """Return a round whose verify pass has been enqueued. No other pass may have been enqueued since."""
        entries, size, drafted = opened.entries, opened.size, opened.drafted
        assert drafted is not None, "the forward pass has been enqueued"
        if opened.tap is not None:
            opened.tap.take(self._runner.decoder, result)
        traced = any(entry.sequence.request.speculation.trace for entry in entries)
        nodes = self._post_nodes(size.rows) if traced else None
        posted = self._ring(size.rows).take()
        logprobs = self._logprobs_ring(size.rows).take() if size.mode is SamplingMode.FULL else None
        marks = Marks(drafted if opened.begun is None else opened.begun, drafted, self._mark())
        provisional = not self._records(size) or self._graphs.provisional_runs > opened.provisional_runs
        return Round(
            opened.number,
            entries,
            opened.starts,
            opened.launched_at,
            posted,
            nodes,
            marks,
            provisional,
            logprobs,
            opened.tap,
        )

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

    def _mark(self) -> Moment:
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
            masked=size.masked,
            draft_dependent=size.capture,
        )
