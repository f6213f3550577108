"""Exchanges states and trees with a drafter in another process, in stream order on both devices.

In each round, the target gathers the states of the slots that draft, in one group per tree shape. The target
sends all groups to the draft together, receives the trees, and checks and packs them. All these steps run in
stream order. Sequences may join and leave between any two rounds, even while other rounds are in flight. A
sequence that does not draft costs the drafter nothing, because its tokens are sent later, in larger commits.

A sequence joins once the drafter has the feature rows of its prompt. Until then, rounds leave out a sequence
in mode `on`, and a sequence in mode `auto` decodes without drafts. Rounds that cannot be exchanged are
drafted through the host (`host_source`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from outrider.kernels.packed_round import GroupRows, gather_group, pack_trees
from outrider.services.target.drafting.draft_source import DraftSource, PreparedDrafts, ProposalWait
from outrider.services.target.drafting.host_source import HostSource
from outrider.services.target.drafting.planner import DraftPlanner, bound_of
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.round_runner import RoundRunner
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.engine.buckets import batch_buckets, bucket
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.spec.drafter import AWAITED
from outrider.shared.spec.exchange_drafter import ExchangedGroup, ExchangeDrafter, ExchangedRound
from outrider.shared.spec.resident import GroupSize, RoundState
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

TURN_S = 0.02
"""Longest uninterrupted wait of the engine, in seconds, if all rows await the drafter.

After this wait, the engine checks for new requests and cancellations, and then waits again.
"""


@dataclass(frozen=True, slots=True)
class _Group:
    """The entries that draft with one shape in a round."""

    shape: DraftShape
    sequences: list[Sequence]
    size: GroupSize


class ExchangeSource(DraftSource):
    """Exchanges states and trees with a drafter in another process. Engine thread only.

    Args:
        drafter: The drafter.
        host: Drafts the rounds that cannot be exchanged.
        rounds: Owns the slots and the packed trees.
        pool: The target's pool.
        controller: Limits the wait for trees.
        planner: Counts the rows that want to draft but cannot.
    """

    def __init__(
        self,
        drafter: ExchangeDrafter,
        host: HostSource,
        rounds: RoundRunner,
        pool: KVPool,
        controller: SpeculationController,
        planner: DraftPlanner,
    ) -> None:
        self._drafter = drafter
        self._slots = drafter.slots
        self._host = host
        self._rounds = rounds
        self._pool = pool
        self._controller = controller
        self._planner = planner
        self._batch_sizes = batch_buckets(rounds.table.slots)
        # Whether the next round is exchanged, as decided by `waits_for_host`.
        self._exchanges = False
        # Sessions that drafted in the last enqueued pass. The drafter has all their rows of earlier passes.
        self._continuous: set[int] = set()
        # For each round in flight, its number at the drafter; 0 if the round was not exchanged.
        self._in_flight: deque[int] = deque()
        # The sequences that await the trees of the last exchanged round.
        self._awaiting: list[Sequence] = []
        self._tried: set[object] = set()

    def planned(self, decodes: Seq[Sequence]) -> list[DraftShape | None]:
        return self._host.planned(decodes)

    def waits_for_host(self, entries: Seq[Entry]) -> bool:
        drafting = [entry for entry in entries if entry.shape.drafts]
        # If an output must follow a grammar, the host must see the trees before they are verified.
        formed = any(entry.sequence.form is not None for entry in entries)
        self._exchanges = (
            bool(drafting)
            and not formed
            and not self._host.awaits_trees
            and self._drafter.device_resident
            and self._slots.fits([group.size for group in self._groups(drafting)])
        )
        return formed or (not self._exchanges and self._host.waits_for_host(entries))

    def postponed(self, entries: Seq[Entry]) -> None:
        self._host.postponed(entries)

    def prepare(self, entries: Seq[Entry]) -> PreparedDrafts:
        # 1. Let the host draft if the round cannot be exchanged.
        if not self._exchanges:
            if any(entry.shape.drafts for entry in entries):
                self._leave(self._continuous)
            self._continuous -= {entry.sequence.session_id for entry in entries}
            prepared = self._host.prepare(entries)
            if prepared.entries:
                self._in_flight.append(0)
            return prepared
        # 2. Find the sequences that can draft.
        placed = {entry.sequence.session_id: entry for entry in entries}
        for entry in entries:
            if entry.shape.drafts:
                self._admit(entry, placed)
        running = list(placed.values())
        # 3. Begin a round with these sequences.
        drafting = [entry for entry in running if entry.shape.drafts]
        joining = [one.sequence for one in drafting if one.sequence.session_id not in self._continuous]
        self._continuous -= set(placed)
        self._host.commit(joining)
        groups = self._groups(drafting)
        started = self._slots.begin([_exchanged(group) for group in groups]) if groups else None
        refused = set(placed) if started is None else set(started.refused)
        for entry in drafting:
            if entry.sequence.session_id in refused:
                self._drop(entry, placed, "resync")
            else:
                self._continuous.add(entry.sequence.session_id)
        running = list(placed.values())
        if not running:
            if not self._in_flight:
                self._slots.await_reply(TURN_S)
            return PreparedDrafts(running, None)
        self._in_flight.append(0 if started is None else started.number)
        if started is None:
            return PreparedDrafts(running, None)
        self._awaiting = [entry.sequence for entry in running if entry.shape.drafts]
        return PreparedDrafts(running, lambda: self._draft(started, groups, running))

    def launched(self) -> None:
        self._slots.hand_over()

    def carry(self) -> None:
        alive = any(sequence.status is not SequenceStatus.ENDED for sequence in self._awaiting)
        self._awaiting = []
        self._slots.carry(wanted=alive)

    def take_wait(self) -> ProposalWait | None:
        return self._host.take_wait()

    def saved(self, seconds: float) -> None:
        self._host.saved(seconds)

    def prefilled(self, chunk: PrefillChunk) -> None:
        self._host.prefilled(chunk)

    def first_token(self, sequence: Sequence, token: int) -> None:
        if sequence.session_id in self._continuous:
            base_len = sequence.committed_len - 1
            self._slots.chosen(sequence.session_id, 0, base_len, [token])
            self._host.lacks(sequence, base_len)
        else:
            self._host.first_token(sequence, token)

    def committed(self, entry: Entry, kept: Seq[int], outcome: Outcome) -> None:
        sequence, number = entry.sequence, self._in_flight[0]
        drafted = number and entry.shape.drafts and entry.epoch == sequence.epoch
        continues = sequence.session_id in self._continuous
        if not drafted and not continues:
            self._slots.left([sequence.session_id])
            self._host.committed(entry, kept, outcome)
            return
        base_len = sequence.committed_len - len(kept)
        self._slots.chosen(sequence.session_id, number if drafted else 0, base_len, kept)
        # The next round's state contains the rows of these tokens. If the sequence does not draft in that
        # round, a commit must contain the rows.
        self._host.lacks(sequence, base_len)
        if not continues:
            self._slots.left([sequence.session_id])

    def read(self, ended: Set[int]) -> None:
        number = self._in_flight.popleft()
        self._slots.measure(exchanged=number > 0)
        # Do not announce a round that can be exchanged.
        self._host.learn(ended, announces=not self._drafter.device_resident)
        if not self._in_flight:
            self._slots.flush()

    def ended(self, sequence: Sequence) -> None:
        self._continuous.discard(sequence.session_id)
        self._host.ended(sequence)

    def abandon(self) -> None:
        self._slots.carry(wanted=False)
        self._leave(self._continuous)
        self._awaiting = []
        self._in_flight.clear()
        self._host.abandon()

    def capture(self, batch_size: int, shape: DraftShape) -> None:
        """Announce a size of rounds to the draft, which records its part."""
        bounded = shape.bounded()
        self._slots.record(GroupSize(batch_size, _columns(bounded), bounded.max_nodes), bounded)

    def _admit(self, entry: Entry, placed: dict[int, Entry]) -> None:
        """Leave out a row that awaits the drafter. Let a row that cannot draft decode without drafts."""
        sequence = entry.sequence
        must_wait = sequence.controller_row is None
        reason = self._slots.obstacle(sequence.session_id, entry.shape, must_wait=must_wait)
        if reason == AWAITED:
            del placed[sequence.session_id]
        elif reason:
            self._drop(entry, placed, reason)

    def _drop(self, entry: Entry, placed: dict[int, Entry], reason: str) -> None:
        """Let a row verify its root alone in this round."""
        placed[entry.sequence.session_id] = replace(entry, shape=NO_DRAFT)
        self._planner.fell_back(entry.sequence, reason)

    def _leave(self, session_ids: Set[int]) -> None:
        self._slots.left(list(session_ids))
        self._slots.flush()
        self._continuous = self._continuous - session_ids

    def _groups(self, drafting: Seq[Entry]) -> list[_Group]:
        by_shape: dict[DraftShape, list[Sequence]] = {}
        for entry in drafting:
            by_shape.setdefault(entry.shape, []).append(entry.sequence)
        groups: list[_Group] = []
        for shape, sequences in by_shape.items():
            batch_size = bucket(self._batch_sizes, len(sequences))
            assert batch_size is not None, "a round has at most as many entries as there are slots"
            columns = max(_columns(shape), *(sequence.fresh_columns for sequence in sequences))
            groups.append(_Group(shape, sequences, GroupSize(batch_size, columns, shape.max_nodes)))
        return groups

    @torch.inference_mode()
    def _draft(self, started: ExchangedRound, groups: Seq[_Group], entries: Seq[Entry]) -> None:
        """Enqueue the exchange of a round, and pack the trees."""
        tried = (*((group.shape, group.size) for group in groups), self._rounds.size_of(entries))
        ahead = tried in self._tried and self._rounds.replays(entries)
        places = {entry.sequence.session_id: index for index, entry in enumerate(entries)}
        members = [self._members(group, places, started.refused) for group in groups]
        table, packed = self._rounds.table, self._rounds.batch
        rows, trees = packed.entries(packed.rows), packed.trees(packed.rows)
        for state, held in zip(started.states, members, strict=True):
            gather_group(table.state, table.features, table.sampling, held, rows, _rows_of(state))
        started.exchange(self._wait_limit_s(len(entries)), ahead)
        for index, held in enumerate(members):
            drafts = started.trees(index)
            pack_trees(
                drafts.tokens,
                drafts.parents,
                drafts.depths,
                drafts.ancestors,
                drafts.num_nodes,
                drafts.logprobs,
                held,
                rows,
                trees,
            )
        self._tried.add(tried)

    def _members(self, group: _Group, places: Mapping[int, int], refused: Collection[int]) -> torch.Tensor:
        """Return the index of each row's entry, ``[G] int32``. Idle rows of the group have -1."""
        ids = [sequence.session_id for sequence in group.sequences]
        held = [places[session_id] for session_id in ids if session_id not in refused]
        idle = [-1] * (group.size.batch_size - len(held))
        return upload(held + idle, torch.int32, self._pool.device)

    def _wait_limit_s(self, batch_size: int) -> float | None:
        """Return the limit of the wait for trees, in seconds; None if only rows in mode `on` wait."""
        drafting = self._awaiting
        auto = [sequence for sequence in drafting if sequence.controller_row is not None]
        if len(auto) == len(drafting):
            return self._controller.wait_cap_s([bound_of(sequence) for sequence in auto], batch_size)
        # The device cannot go on without the rows in mode `on`. If the round has other rows, limit their
        # wait.
        return self._slots.others_s if batch_size > len(drafting) - len(auto) else None


def _columns(shape: DraftShape) -> int:
    """Return the largest number of tokens that a round with this shape may choose for a sequence."""
    return min(shape.depth, shape.max_nodes - 1) + 1


def _exchanged(group: _Group) -> ExchangedGroup:
    return ExchangedGroup(
        group.shape,
        group.size.batch_size,
        group.size.columns,
        [sequence.session_id for sequence in group.sequences],
        [sequence.committed_upper for sequence in group.sequences],
    )


def _rows_of(state: RoundState) -> GroupRows:
    return GroupRows(
        state.committed_lens,
        state.counts,
        state.tokens,
        state.features,
        state.temperature,
        state.seeds,
        state.choices,
    )
