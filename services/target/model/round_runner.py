"""Rounds that stay on the device: enqueues them one after the other, and reads each back when the next is on its way.

A round is one piece of device work, recorded as a CUDA graph where there are graphs: idle what ended, draft,
verify, walk, compact, store, and write the `RoundState` that the next round starts from. The host adds pages
and takes rows out, in stream order. With a draft in another process the recorded piece begins where its trees
have come; the exchange before it is enqueued anew each round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.kernels.verify_round import RoundTensors, begin_round, post_round
from outrider.services.target.model.bucketed_verify import table_pages
from outrider.services.target.model.graph_key import GraphKey
from outrider.services.target.model.input_batch import InputBatch, SamplingMode
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.verify_step import root_batch, unpack, verify_step
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.graphs import GraphCache
from outrider.shared.kv.upload import upload
from outrider.shared.spec.resident import DeviceDrafter, ExchangedBatch, ResidentBatch, RoundState
from outrider.shared.spec.tree import DraftShape

RESULTS_KEPT = 5
"""Places for results in turn: two rounds may be on their way, and a recording runs two."""
MOST_TABLES = 512
"""Sizes of batches with tables of their own, some ten KiB each; with one more, those are let go that no graph reads."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """What is fixed from `enter` to `leave`."""

    shape: DraftShape
    mode: SamplingMode
    capture: bool
    state: RoundState
    rounds: ResidentBatch | None
    exchanged: ExchangedBatch | None
    """The rounds, if a draft in another process has a part in them."""


class _Results:
    """Results of rounds of one size: a ring in memory of the host, into which the rounds write.

    Args:
        bs, columns: Of the rounds' state.
        device: Where they run.
    """

    def __init__(self, bs: int, columns: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            size = (RESULTS_KEPT, bs, 2 + 2 * columns)
            self._ring = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._next = 0

    def post(self, packed: torch.Tensor) -> None:
        """Write a round's result to the next place: part of the round, recorded or not."""
        post_round(packed, self._ring, self._turn)

    def take(self) -> torch.Tensor:
        """Return where the round that was enqueued just now writes."""
        place, self._next = self._next, (self._next + 1) % RESULTS_KEPT
        return self._ring[place]

    def recorded(self) -> None:
        """Go on behind what a recording has run for trial; waits for the device."""
        self._next = int(self._turn)


@dataclass(frozen=True, slots=True)
class _Enqueued:
    launched_at: float
    result: torch.Tensor
    done: torch.cuda.Event | None
    order: Seq[int]
    """Which row of the result each row of the batch takes."""


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """One round on the host: a row per sequence of `enter` or `move` (None: it was idle), and how long the device took for it."""

    rows: list[Outcome | None]
    seconds: float


class RoundRunner:
    """Engine thread only; under inference mode.

    Args:
        runner: The model.
        graphs: Where rounds are recorded.
        drafter: What drafts on the device, or None.
        columns: R of drafting rounds; deeper shapes take more.
        recorded: The largest batch that is recorded; None for all.
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
        self._results: dict[tuple[int, int], _Results] = {}
        self._batch: _Batch | None = None
        self._current: InputBatch | None = None
        self._rows: list[Sequence | None] = []
        self._enqueued: deque[_Enqueued] = deque()
        # Rounds that have run with a draft in another process.
        self._tried: set[GraphKey] = set()
        self._last_read = 0.0

    @property
    def active(self) -> bool:
        """Whether a batch was entered and not left."""
        return self._batch is not None

    @property
    def in_flight(self) -> int:
        """Rounds that were enqueued and not read."""
        return len(self._enqueued)

    @property
    def exchanges(self) -> bool:
        """Whether another process takes part in the rounds that were entered."""
        return self._batch is not None and self._batch.exchanged is not None

    @torch.inference_mode()
    def enter(self, sequences: Seq[Sequence], bs: int, shape: DraftShape) -> bool:
        """Load a batch, padded to `bs` rows; False when the drafter cannot take it now."""
        assert self._batch is None
        capture = self._runner.captures and any(sequence.has_features for sequence in sequences)
        state = self._state(bs, shape)
        tables = self._tables_for(
            bs, shape.max_nodes, table_pages(sequences, self._runner.pool.page_size, shape.max_nodes)
        )
        tables.load(sequences)
        _load(state, tables)
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
        """Enqueue one round; False when the drafter has no room for it.

        Args:
            committed_upper: For every row of `enter`, see `ResidentBatch.reserve`. The leases hold that and a
                tree.
            wait_limit_s: Says how long a draft in another process is waited for, see
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
        begin_round(_round_tensors(batch.state), self._current.limits)
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
        """Do for the round that was enqueued last what its drafter has left to the host, see `ExchangedBatch.carry`: before the next one
        is enqueued or this one is read, but after the one before was, since it is complete."""
        batch = self._entered()
        if batch.exchanged is not None:
            batch.exchanged.carry(wanted)

    def read(self) -> FinishedRound:
        """Wait for the oldest round that was enqueued, and return what it chose."""
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
        """Tell the drafter what a round that was read chose; empty for rows that ended."""
        rounds = self._entered().rounds
        if rounds is not None:
            rounds.committed(tokens_per_row)

    def retire(self, row: int) -> None:
        """Let a row go idle from the next enqueued round on; its pages may be given away at once, as the stream keeps the order."""
        rounds = self._entered().rounds
        if self._rows[row] is not None:
            self._rows[row] = None
            if rounds is not None:
                rounds.retire([row])

    @torch.inference_mode()
    def move(self, rows: Seq[int], bs: int) -> bool:
        """Go on with these rows alone, none of which ended, padded to `bs`, less than now; False when the drafter cannot.

        All of it is enqueued behind the rounds that are on their way, which are not waited for. What is read
        of them from now on, and all later calls, speak of the new rows.
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
        _load(state, tables)
        _take_rows(state, batch.state, rows)
        self._batch = replace(batch, state=state, mode=SamplingMode.of(going))
        self._current, self._rows = tables, sequences
        self._enqueued = deque(replace(one, order=[one.order[row] for row in rows]) for one in self._enqueued)
        return True

    def leave(self) -> None:
        """End the batch. Rounds that were not read are dropped: only those may be that have nothing to tell, all rows having ended."""
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
        """Record the round of one size before it is needed."""
        state = self._state(bs, shape)
        tables = self._tables_for(
            bs, shape.max_nodes, table_pages((), self._runner.pool.page_size, shape.max_nodes)
        )
        tables.make_idle()
        _load(state, tables)
        rounds = self._drafter.rounds_for_capture(shape, state) if shape.drafts and self._drafter else None
        self._batch = _Batch(shape, mode, capture, state, rounds, _exchanged(rounds))
        self._current = tables
        try:
            self._graphs.capture(self._key(self._batch), self._round)
            self._results_of(state).recorded()
        finally:
            self._batch = None

    def _round(self) -> None:
        """One round, from where it can be recorded; all it touches stays where it is from round to round."""
        batch, tables = self._entered(), self._current
        assert tables is not None
        state = batch.state
        round_state = _round_tensors(state)
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
        """Return what enqueues the round: a replay, or each kernel by itself of a size that hardly ever comes up or is too large."""
        if (self._recorded is not None and batch.state.bs > self._recorded) or not self._graphs.due(key):
            return self._round
        if not self._graphs.holds(key):
            self._capture(batch, key)
        return lambda: self._graphs.run(key, self._round)

    def _capture(self, batch: _Batch, key: GraphKey) -> None:
        """Record with idle rows, then go on with what the state held."""
        state = batch.state
        fields = (state.committed_lens, state.tokens, state.counts, state.features)
        held = [field.clone() for field in fields]
        state.counts.zero_()
        self._graphs.capture(key, self._round)
        self._results_of(state).recorded()
        for field, value in zip(fields, held, strict=True):
            field.copy_(value)

    def _renew_tables(self, batch: _Batch) -> None:
        """Describe rows that ended and pages that were added; move to wider tables when a lease outgrew them."""
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
        """Note the round that was enqueued just now."""
        done = None
        if state.counts.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return _Enqueued(launched_at, self._results_of(state).take(), done, range(len(self._rows)))

    def _results_of(self, state: RoundState) -> _Results:
        return self._results[state.bs, state.columns]

    def _state(self, bs: int, shape: DraftShape) -> RoundState:
        pool = self._runner.pool
        columns = max(self._columns, shape.depth + 1) if shape.drafts else 1
        feature_size = pool.feature_size if shape.drafts else 0
        key = (bs, columns, feature_size)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = RoundState.idle(bs, columns, feature_size, pool.dtype, pool.device)
            self._results.setdefault((bs, columns), _Results(bs, columns, pool.device))
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
        """Let go of what no graph reads: which shapes come up is for clients to say, and nothing may grow by that."""
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


def _round_tensors(state: RoundState) -> RoundTensors:
    return RoundTensors(state.committed_lens, state.tokens, state.counts)


def _load(state: RoundState, tables: InputBatch) -> None:
    """Make every row idle and copy what the tables know of the sequences."""
    state.counts.zero_()
    state.tokens.zero_()
    state.committed_lens.copy_(tables.committed_lens)
    rows = tables.first_rows
    state.temperature.copy_(rows.temperature)
    state.seeds.copy_(rows.seeds)
    state.choices.copy_(rows.choices)


def _take_rows(state: RoundState, source: RoundState, rows: Seq[int]) -> None:
    """Copy what a round left in `rows` of one state to the first rows of another."""
    index = upload(rows, torch.int64, state.counts.device)
    for mine, theirs in (
        (state.committed_lens, source.committed_lens),
        (state.counts, source.counts),
        (state.tokens, source.tokens),
        (state.features, source.features),
    ):
        mine[: len(rows)].copy_(theirs.index_select(0, index))
