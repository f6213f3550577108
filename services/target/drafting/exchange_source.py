"""Draft trees from a drafter in another process whose rounds stay on both devices.

In each round, the state of the drafting slots is gathered and sent to the draft, and its trees are received,
checked and packed, all in stream order. The draft keeps a batch of fixed rows and one tree shape. If the
drafting sequences change, the loop reads all rounds, and the batch is left and entered again. Sequences
without drafts join and leave freely. Rounds that cannot be exchanged are drafted through the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass

import torch

from outrider.kernels.packed_round import Entries, GroupRows, gather_group, pack_trees
from outrider.services.target.drafting.draft_source import DraftSource, PreparedDrafts, ProposalWait
from outrider.services.target.drafting.host_source import HostSource
from outrider.services.target.drafting.planner import bound_of
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.round_runner import RoundRunner
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.engine.buckets import batch_buckets, bucket
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.spec.resident import ExchangedBatch, ExchangeDrafter, RoundState
from outrider.shared.spec.tree import DraftShape


@dataclass(slots=True)
class _Exchange:
    """The batch that takes part in the current rounds.

    Attributes:
        batch: The draft's part of the rounds.
        shape: Shape of every tree.
        members: The sequence of each row of the batch; None once it has ended.
        state: The state that is sent to the draft.
        slots: ``[bs] int32``, the slot of each row; -1 for an idle row.
        fresh: True until the first round, whose state the draft has filled itself.
        stale: True if rows have ended since `slots` was written.
    """

    batch: ExchangedBatch
    shape: DraftShape
    members: list[Sequence | None]
    state: RoundState
    slots: torch.Tensor
    fresh: bool = True
    stale: bool = False

    @property
    def live(self) -> list[Sequence]:
        """The members that have not ended."""
        return [sequence for sequence in self.members if sequence is not None]


class ExchangeSource(DraftSource):
    """Exchanges states and trees with a drafter in another process. Engine thread only.

    Args:
        drafter: The drafter.
        host: Drafts the rounds that cannot be exchanged.
        rounds: Owns the slots and the packed trees.
        pool: The target's pool.
        controller: Limits the wait for trees.
        columns: Number of columns of the states of the default shape.
    """

    def __init__(
        self,
        drafter: ExchangeDrafter,
        host: HostSource,
        rounds: RoundRunner,
        pool: KVPool,
        controller: SpeculationController,
        columns: int,
    ) -> None:
        self._drafter = drafter
        self._host = host
        self._rounds = rounds
        self._pool = pool
        self._controller = controller
        self._columns = columns
        self._batch_sizes = batch_buckets(rounds.table.slots)
        self._states: dict[tuple[int, int, int], RoundState] = {}
        self._exchange: _Exchange | None = None
        # For each round in flight, whether it was exchanged.
        self._in_flight: deque[bool] = deque()
        self._kept: dict[int, list[int]] = {}
        self._tried: set[tuple[int, DraftShape, object]] = set()

    def planned(self, decodes: Seq[Sequence]) -> list[DraftShape | None]:
        return self._host.planned(decodes)

    def waits_for_host(self, entries: Seq[Entry]) -> bool:
        exchange = self._exchange
        if exchange is None:
            return self._host.waits_for_host(entries)
        if any(entry.sequence.form is not None for entry in entries):
            return True
        drafting = [entry for entry in entries if entry.shape.drafts]
        same = {entry.sequence.session_id for entry in drafting} == {
            sequence.session_id for sequence in exchange.live
        }
        if not drafting or not same or any(entry.shape != exchange.shape for entry in drafting):
            return True
        uppers = [0 if one is None else one.committed_upper for one in exchange.members]
        return not exchange.batch.reserve(uppers)

    def postponed(self, entries: Seq[Entry]) -> None:
        self._host.postponed(entries)

    def prepare(self, entries: Seq[Entry]) -> PreparedDrafts:
        # 1. Leave a batch that cannot go on, and start another one if the draft can take part.
        if self._exchange is not None and self.waits_for_host(entries):
            self._leave()
        drafting = [entry for entry in entries if entry.shape.drafts]
        # The host must see trees before they are verified if an output has a form.
        formed = any(entry.sequence.form is not None for entry in entries)
        if self._exchange is None and drafting and not formed and not self._host.announced:
            self._exchange = self._enter(drafting)
        exchange = self._exchange
        if exchange is None:
            prepared = self._host.prepare(entries)
            if prepared.entries:
                self._in_flight.append(False)
            return prepared
        self._in_flight.append(True)
        # 2. Exchange.
        places = {entry.sequence.session_id: index for index, entry in enumerate(entries)}
        members = [-1 if one is None else places[one.session_id] for one in exchange.members]
        return PreparedDrafts(entries, lambda: self._draft(exchange, members, entries))

    def launched(self) -> None:
        if self._exchange is not None:
            self._exchange.batch.hand_over()

    def carry(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        exchange.batch.carry(wanted=bool(exchange.live))
        if not exchange.live and not self._in_flight:
            self._leave()

    def take_wait(self) -> ProposalWait | None:
        return self._host.take_wait()

    def prefilled(self, chunk: PrefillChunk) -> None:
        self._host.prefilled(chunk)

    def first_token(self, sequence: Sequence, token: int) -> None:
        self._host.first_token(sequence, token)

    def committed(self, entry: Entry, kept: Seq[int], outcome: Outcome) -> None:
        exchanged = self._in_flight[0] and entry.shape.drafts
        if exchanged:
            self._kept[entry.sequence.session_id] = list(kept)
            self._host.told(entry.sequence)
        else:
            self._host.committed(entry, kept, outcome)

    def read(self, ended: Set[int]) -> None:
        exchanged, exchange = self._in_flight.popleft(), self._exchange
        if exchanged and exchange is not None:
            kept, self._kept = self._kept, {}
            exchange.batch.committed(
                [[] if one is None else kept.get(one.session_id, []) for one in exchange.members]
            )
        # Do not announce a round that can be exchanged.
        self._host.learn(ended, announces=exchange is None and not self._drafter.device_resident)

    def ended(self, sequence: Sequence) -> None:
        exchange = self._exchange
        if exchange is not None and sequence in exchange.members:
            row = exchange.members.index(sequence)
            exchange.members[row] = None
            exchange.stale = True
            exchange.batch.retire([row])
        self._host.ended(sequence)

    def abandon(self) -> None:
        exchange, self._exchange = self._exchange, None
        self._in_flight.clear()
        self._kept.clear()
        self._host.abandon()
        if exchange is not None:
            exchange.batch.carry(wanted=False)
            exchange.batch.leave()

    def capture(self, batch_size: int, shape: DraftShape) -> None:
        """Announce a size of rounds to the draft, which records its part."""
        self._drafter.rounds_for_capture(shape, self._state(batch_size, shape))

    @torch.inference_mode()
    def _enter(self, drafting: Seq[Entry]) -> _Exchange | None:
        """Start rounds with these rows. Return None if that is not possible now."""
        shape, sequences = drafting[0].shape, [entry.sequence for entry in drafting]
        if not self._drafter.device_resident or any(entry.shape != shape for entry in drafting):
            return None
        size = bucket(self._batch_sizes, len(sequences))
        assert size is not None, "a round has at most as many entries as there are slots"
        self._host.commit(sequences)
        state = self._state(size, shape)
        slots = self._slots(sequences, size)
        for sequence in sequences:
            self._rounds.table.hold(sequence)
        self._rounds.table.flush()
        self._gather(state, slots)
        state.counts.zero_()
        batch = self._drafter.enter([one.session_id for one in sequences], shape, state)
        if batch is None:
            return None
        assert isinstance(batch, ExchangedBatch)
        if not batch.reserve([one.committed_upper for one in sequences]):
            batch.leave()
            return None
        return _Exchange(batch, shape, list(sequences), state, slots)

    def _leave(self) -> None:
        """End the rounds. Every round has been read."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        exchange.batch.carry(wanted=False)
        with torch.inference_mode():
            if not exchange.fresh:
                self._refresh(exchange)
                self._gather(exchange.state, exchange.slots)  # the features of the last round
            exchange.batch.leave()
        for sequence in exchange.live:
            self._host.told(sequence)

    def _draft(self, exchange: _Exchange, members: list[int], entries: Seq[Entry]) -> None:
        """Enqueue the exchange of a round, and pack the trees."""
        state, batch = exchange.state, exchange.batch
        tried = (state.bs, exchange.shape, self._rounds.size_of(entries))
        ahead = tried in self._tried and self._rounds.replays(entries)
        self._refresh(exchange)
        if not exchange.fresh:
            self._gather(state, exchange.slots)
        exchange.fresh = False
        places = upload(members + [-1] * (state.bs - len(members)), torch.int32, self._pool.device)
        batch.exchange(state, self._wait_limit_s(exchange, len(entries)), ahead)
        drafts, packed = batch.draft(state), self._rounds.batch
        pack_trees(
            drafts.tokens,
            drafts.parents,
            drafts.depths,
            drafts.ancestors,
            drafts.num_nodes,
            drafts.logprobs,
            places,
            packed.entries(packed.rows),
            packed.trees(packed.rows),
        )
        self._tried.add(tried)

    def _wait_limit_s(self, exchange: _Exchange, batch_size: int) -> float | None:
        """Return the limit of the wait for trees, in seconds; None if only rows in mode `on` wait."""
        auto = [sequence for sequence in exchange.live if sequence.controller_row is not None]
        if len(auto) == len(exchange.live):
            return self._controller.wait_cap_s([bound_of(sequence) for sequence in auto], batch_size)
        # The device cannot leave out the rows in mode `on`, so other rows limit the wait for their trees.
        return exchange.batch.others_s if batch_size > len(exchange.live) - len(auto) else None

    def _refresh(self, exchange: _Exchange) -> None:
        """Write the slots again if members have ended."""
        if exchange.stale:
            exchange.slots.copy_(self._slots(exchange.members, exchange.state.bs))
            exchange.stale = False

    def _slots(self, members: Seq[Sequence | None], size: int) -> torch.Tensor:
        slots = [-1 if one is None else one.slot for one in members]
        return upload(slots + [-1] * (size - len(slots)), torch.int32, self._pool.device)

    def _gather(self, state: RoundState, slots: torch.Tensor) -> None:
        table = self._rounds.table
        members = torch.arange(state.bs, dtype=torch.int32, device=slots.device)
        rows = GroupRows(
            state.committed_lens,
            state.counts,
            state.tokens,
            state.features,
            state.temperature,
            state.seeds,
            state.choices,
        )
        entries = Entries(slots, slots, slots, slots)
        gather_group(table.state, table.features, table.sampling, members, entries, rows)

    def _state(self, batch_size: int, shape: DraftShape) -> RoundState:
        columns = max(self._columns, shape.depth + 1)
        key = (batch_size, columns, self._pool.feature_size)
        if key not in self._states:
            self._states[key] = RoundState.idle(*key, self._pool.dtype, self._pool.device)
        return self._states[key]
