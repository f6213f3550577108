"""Enqueues rounds that stay on the device, as CUDA graphs where possible; reads each result one round late.

A round is one piece of device work, replayed from a CUDA graph where possible:

1. Make ended rows idle, and draft.
2. Verify and walk the tree.
3. Compact the K/V and store the features.
4. Write the `RoundState`, the input of the next round.

The host adds pages and removes rows in stream order. If the draft is in another process, the exchange with
the draft is enqueued separately in each round. The recorded part of the round starts after the draft's trees
have arrived.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.kernels.verify_round import begin_round
from outrider.services.target.model.bucketed_verify import table_pages
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.input_batch import InputBatch, SamplingMode
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.result_ring import ResultRing
from outrider.services.target.model.state_rows import load_state, round_tensors, take_rows
from outrider.services.target.model.verify_step import root_batch, unpack, verify_step
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.resident import DeviceDrafter, ExchangedBatch, ResidentBatch, RoundState
from outrider.shared.spec.tree import DraftShape

MOST_TABLES = 512
"""Number of input tables, of about 10 KiB each, above which tables that no graph reads are freed."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The properties of a batch that are fixed from `enter` to `leave`.

    Attributes:
        shape: Shape of the draft trees.
        mode: Sampling mode.
        capture: True if feature rows are computed and stored.
        state: The state between two rounds.
        rounds: The drafter's part of the rounds. None without drafts.
        exchanged: The same object as `rounds` if the draft is in another process, else None.
    """

    shape: DraftShape
    mode: SamplingMode
    capture: bool
    state: RoundState
    rounds: ResidentBatch | None
    exchanged: ExchangedBatch | None


@dataclass(frozen=True, slots=True)
class _Enqueued:
    """A round in flight. `order` maps each row of the batch to a row of the result."""

    launched_at: float
    result: torch.Tensor
    done: torch.cuda.Event | None
    order: Seq[int]


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """The result of one round on the host.

    Attributes:
        rows: One outcome per sequence of the last `enter` or `move`. None for a row that was idle.
        seconds: Device time of the round, in seconds.
    """

    rows: list[Outcome | None]
    seconds: float


class RoundRunner:
    """Enqueues and reads the rounds of one batch. Engine thread only, under inference mode.

    Args:
        runner: The model.
        graphs: Records and replays rounds.
        drafter: The drafter whose rounds stay on the device. None without drafts.
        columns: R, the maximum number of tokens per row, of rounds with drafts. Deeper shapes use a larger R.
        recorded: Largest batch to record. None records all batches.
    """

    def __init__(
        self,
        runner: ModelRunner,
        graphs: GraphCache,
        drafter: DeviceDrafter | None,
        columns: int,
        recorded: int | None = None,
    ) -> None:
        self._runner = runner
        self._graphs = graphs
        self._drafter = drafter
        self._columns, self._recorded = columns, recorded
        self._states: dict[tuple[int, int, int], RoundState] = {}
        self._tables: dict[tuple[int, int, int], InputBatch] = {}
        self._results: dict[tuple[int, int], ResultRing] = {}
        self._batch: _Batch | None = None
        self._current: InputBatch | None = None
        self._rows: list[Sequence | None] = []
        self._enqueued: deque[_Enqueued] = deque()
        # Graph keys of rounds that have already run with a draft in another process.
        self._tried: set[GraphKey] = set()
        self._last_read = 0.0

    @property
    def active(self) -> bool:
        """True from `enter` to `leave`."""
        return self._batch is not None

    @property
    def in_flight(self) -> int:
        """Number of rounds that were enqueued but not read yet."""
        return len(self._enqueued)

    @property
    def exchanges(self) -> bool:
        """True if another process takes part in the current rounds."""
        return self._batch is not None and self._batch.exchanged is not None

    @torch.inference_mode()
    def enter(self, sequences: Seq[Sequence], bs: int, shape: DraftShape) -> bool:
        """Load a batch, padded to `bs` rows. Return False if the drafter cannot take part now."""
        assert self._batch is None
        capture = self._runner.captures and any(sequence.has_features for sequence in sequences)
        state = self._state(bs, shape)
        tables = self._tables_for(
            bs, shape.max_nodes, table_pages(sequences, self._runner.pool.page_size, shape.max_nodes)
        )
        tables.load(sequences)
        load_state(state, tables)
        rounds = None
        if shape.drafts:
            assert self._drafter is not None
            rounds = self._drafter.enter([sequence.session_id for sequence in sequences], shape, state)
            if rounds is None:
                return False
        else:
            roots = torch.tensor([sequence.tokens[-1] for sequence in sequences], dtype=torch.int32)
            state.tokens[: len(sequences), 0].copy_(roots)
            state.counts[: len(sequences)].fill_(1)
        self._batch = _Batch(shape, SamplingMode.of(sequences), capture, state, rounds, _exchanged(rounds))
        self._current = tables
        self._rows = list(sequences)
        return True

    @torch.inference_mode()
    def launch(
        self, committed_upper: Seq[int], wait_limit_s: Callable[[], float | None] = lambda: None
    ) -> bool:
        """Enqueue one round. Return False if the drafter has no room for another round.

        Args:
            committed_upper: An upper bound of committed_len for every row; see `ResidentBatch.reserve`. The
                leases must have room for these tokens and a tree.
            wait_limit_s: Returns the longest wait for a draft in another process, see
                `ExchangedBatch.exchange`.
        """
        batch = self._entered()
        if batch.rounds is not None and not batch.rounds.reserve(committed_upper):
            return False
        self._renew_tables(batch)
        key = self._key(batch)
        run = self._ready(batch, key)
        launched_at = time.monotonic()
        exchanged = batch.exchanged
        if exchanged is None:
            run()
            self._enqueued.append(self._on_its_way(batch.state, launched_at))
            return True
        assert self._current is not None
        begin_round(round_tensors(batch.state), self._current.limits)
        ahead = self._graphs.replays(key) and key in self._tried
        try:
            exchanged.exchange(batch.state, wait_limit_s(), ahead)
            run()
            self._enqueued.append(self._on_its_way(batch.state, launched_at))
        finally:
            exchanged.hand_over()
        self._tried.add(key)
        return True

    def carry(self, wanted: bool = True) -> None:
        """Do the host's part of the last enqueued round; see `ExchangedBatch.carry`.

        Call after the previous round was read, but before this round is read or another round is enqueued.
        """
        batch = self._entered()
        if batch.exchanged is not None:
            batch.exchanged.carry(wanted)

    def read(self) -> FinishedRound:
        """Wait for the oldest enqueued round and return its result."""
        enqueued = self._enqueued.popleft()
        if enqueued.done is not None:
            enqueued.done.synchronize()
        result = enqueued.result.tolist()
        rows = unpack([result[row] for row in enqueued.order])
        now = time.monotonic()
        seconds = now - max(enqueued.launched_at, self._last_read)
        self._last_read = now
        return FinishedRound(rows, seconds)

    def committed(self, tokens_per_row: Seq[Seq[int]]) -> None:
        """Pass the tokens of a round that was read to the drafter, with no tokens for rows that ended."""
        rounds = self._entered().rounds
        if rounds is not None:
            rounds.committed(tokens_per_row)

    def retire(self, row: int) -> None:
        """Make a row idle from the next round on. Its pages may be freed now, because of stream order."""
        rounds = self._entered().rounds
        if self._rows[row] is not None:
            self._rows[row] = None
            if rounds is not None:
                rounds.retire([row])

    @torch.inference_mode()
    def move(self, rows: Seq[int], bs: int) -> bool:
        """Continue with these rows only, padded to a smaller `bs`. None of these rows has ended.

        The move is enqueued behind the rounds in flight, without waiting for these rounds. Later results and
        calls use the new row numbers.

        Returns:
            False if the drafter cannot move.
        """
        batch, sequences = self._entered(), [self._rows[row] for row in rows]
        state = self._state(bs, batch.shape)
        assert state is not batch.state
        if batch.rounds is not None and not batch.rounds.move(rows, state):
            return False
        going = [sequence for sequence in sequences if sequence is not None]
        tables = self._tables_for(
            bs, batch.shape.max_nodes, table_pages(going, self._runner.pool.page_size, batch.shape.max_nodes)
        )
        tables.load(sequences)
        load_state(state, tables)
        take_rows(state, batch.state, rows)
        self._batch = replace(batch, state=state, mode=SamplingMode.of(going))
        self._current, self._rows = tables, sequences
        self._enqueued = deque(replace(one, order=[one.order[row] for row in rows]) for one in self._enqueued)
        return True

    def leave(self) -> None:
        """End the batch and drop unread rounds. Rounds may only be unread if all their rows have ended."""
        self.carry(wanted=False)
        rounds = self._entered().rounds
        self._enqueued.clear()
        self._batch = None
        self._rows = []
        if rounds is not None:
            with torch.inference_mode():
                rounds.leave()

    @torch.inference_mode()
    def capture(self, bs: int, shape: DraftShape, mode: SamplingMode, capture: bool) -> None:
        """Record the round of one size before the round is needed."""
        state = self._state(bs, shape)
        tables = self._tables_for(
            bs, shape.max_nodes, table_pages((), self._runner.pool.page_size, shape.max_nodes)
        )
        tables.make_idle()
        load_state(state, tables)
        rounds = self._drafter.rounds_for_capture(shape, state) if shape.drafts and self._drafter else None
        self._batch = _Batch(shape, mode, capture, state, rounds, _exchanged(rounds))
        self._current = tables
        try:
            self._graphs.capture(self._key(self._batch), self._round)
            self._results_of(state).recorded()
        finally:
            self._batch = None

    def _round(self) -> None:
        """Run the part of a round that can be recorded. All tensors of this part keep their addresses."""
        batch, tables = self._entered(), self._current
        assert tables is not None
        state = batch.state
        round_state = round_tensors(state)
        if batch.exchanged is None:
            roots = begin_round(round_state, tables.limits)
        drafts = root_batch(roots, tables) if batch.rounds is None else batch.rounds.draft(state)
        model = self._runner.step_model(batch.capture)
        features = state.features if batch.rounds is not None else None
        live, lens = state.counts, state.committed_lens
        packed = verify_step(
            model, tables, batch.mode, live, lens, drafts, state.columns, round_state, features
        ).packed
        self._results_of(state).post(packed)

    def _key(self, batch: _Batch) -> GraphKey:
        tables = self._current
        assert tables is not None
        drafter_key = None if batch.rounds is None else batch.rounds.key
        return GraphKey(
            "round",
            tables.bs,
            nodes=batch.shape.max_nodes,
            pages=tables.pages,
            mode=batch.mode,
            shape=batch.shape,
            columns=batch.state.columns,
            capture=batch.capture,
            drafter=drafter_key,
            draft_dependent=batch.capture or batch.shape.drafts,
        )

    def _ready(self, batch: _Batch, key: GraphKey) -> Callable[[], None]:
        """Return a function that enqueues the round as a graph or, for rare or large sizes, as kernels."""
        if (self._recorded is not None and batch.state.bs > self._recorded) or not self._graphs.due(key):
            return self._round
        if not self._graphs.holds(key):
            self._capture(batch, key)
        return lambda: self._graphs.run(key, self._round)

    def _capture(self, batch: _Batch, key: GraphKey) -> None:
        """Record the round with idle rows, then restore the state."""
        state = batch.state
        fields = (state.committed_lens, state.tokens, state.counts, state.features)
        held = [field.clone() for field in fields]
        state.counts.zero_()
        self._graphs.capture(key, self._round)
        self._results_of(state).recorded()
        for field, value in zip(fields, held, strict=True):
            field.copy_(value)

    def _renew_tables(self, batch: _Batch) -> None:
        """Upload ended rows and added pages. Use wider tables if a lease has outgrown the current tables."""
        assert self._current is not None
        remaining = [sequence for sequence in self._rows if sequence is not None]
        tables = self._current
        needed = table_pages(remaining, tables.page_size, tables.nodes)
        if needed > tables.pages:
            self._current = self._tables_for(tables.bs, tables.nodes, needed)
            self._current.load(self._rows)
        else:
            tables.refresh(self._rows)

    def _on_its_way(self, state: RoundState, launched_at: float) -> _Enqueued:
        """Describe the round that was just enqueued."""
        done = None
        if state.counts.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return _Enqueued(launched_at, self._results_of(state).take(), done, range(len(self._rows)))

    def _results_of(self, state: RoundState) -> ResultRing:
        return self._results[state.bs, state.columns]

    def _state(self, bs: int, shape: DraftShape) -> RoundState:
        pool = self._runner.pool
        columns = max(self._columns, shape.depth + 1) if shape.drafts else 1
        feature_size = pool.feature_size if shape.drafts else 0
        key = (bs, columns, feature_size)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = RoundState.idle(bs, columns, feature_size, pool.dtype, pool.device)
            self._results.setdefault((bs, columns), ResultRing(bs, columns, pool.device))
        return found

    def _tables_for(self, bs: int, nodes: int, pages: int) -> InputBatch:
        found = self._tables.get((bs, nodes, pages))
        if found is None:
            if len(self._tables) >= MOST_TABLES:
                self._forget_unused()
            pool = self._runner.pool
            found = self._tables[bs, nodes, pages] = InputBatch(bs, nodes, pages, pool.page_size, pool.device)
        return found

    def _forget_unused(self) -> None:
        """Free tables that no graph reads, because clients choose the shapes and could fill the memory."""
        keys = {key for key in self._graphs.keys if isinstance(key, GraphKey)}
        self._tried &= keys
        used = {(key.rows, key.nodes, key.pages) for key in keys if key.kind == "round"}
        self._tables = {
            size: tables for size, tables in self._tables.items() if size in used or tables is self._current
        }

    def _entered(self) -> _Batch:
        assert self._batch is not None, "enter() comes first"
        return self._batch


def _exchanged(rounds: ResidentBatch | None) -> ExchangedBatch | None:
    return rounds if isinstance(rounds, ExchangedBatch) else None
