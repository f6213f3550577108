"""Exchanges round states and trees with a drafter in another process, in stream order on both devices.

In each round, the target gathers the states of the slots that draft, in one group per tree shape. It sends
all groups together, receives the trees, checks them and packs them. Sequences may join and leave between any
two rounds. The drafter does no work for a sequence that does not draft. The tokens of such a sequence are
sent later, in larger commits.

A sequence joins the exchange once the drafter has the feature rows of its prompt. Until then, a sequence in
mode `on` is left out of rounds, and a sequence in mode `auto` decodes without drafts. If a round cannot be
exchanged, its trees are requested through the host (`host_source`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from outrider.services.target.drafting.draft_source import DraftSource, PreparedDrafts, ProposalWait
from outrider.services.target.drafting.host_source import HostSource
from outrider.services.target.drafting.planner import DraftPlanner
from outrider.services.target.drafting.shape_groups import (
    ShapeGroup,
    gather_rows,
    pack_drafts,
    shape_groups,
)
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.shared.engine.buckets import batch_buckets
from outrider.shared.kv.pool import KVPool
from outrider.shared.kv.upload import upload
from outrider.shared.spec.drafter import AWAITED
from outrider.shared.spec.exchanged_slots import ExchangedGroup, ExchangedSlots, TreeExchange
from outrider.shared.spec.resident import GroupSize
from outrider.shared.spec.tree import NO_DRAFT, DraftShape

TURN_S = 0.02
"""Longest uninterrupted wait of the engine, in seconds, if all entries await the drafter.

After this wait, the engine checks for new requests and cancellations, and then waits again.
"""


class ExchangeSource(DraftSource):
    """Draft source that exchanges states and trees with a drafter in another process. Engine thread only.

    Args:
        slots: The slots of the drafter.
        host: Drafts the rounds that cannot be exchanged.
        step_runner: Owns the target's slots and the packed trees.
        pool: The target's KV pool.
        planner: Counts the sequences that want to draft but cannot.
    """

    def __init__(
        self,
        slots: ExchangedSlots,
        host: HostSource,
        step_runner: StepRunner,
        pool: KVPool,
        planner: DraftPlanner,
    ) -> None:
        self._slots = slots
        self._host = host
        self._step_runner = step_runner
        self._pool = pool
        self._planner = planner
        self._batch_sizes = batch_buckets(step_runner.table.slots)
        # Whether the next round is exchanged, as decided by `waits_for_host`.
        self._exchanges = False
        # Sessions that drafted in the last enqueued pass. The drafter has all their rows of earlier passes.
        self._continuous: set[int] = set()
        # For each round in flight, its number at the drafter; 0 if the round was not exchanged.
        self._in_flight: deque[int] = deque()
        # The sequences that await the trees of the last exchanged round.
        self._awaiting: list[Sequence] = []
        self._tried: set[object] = set()

    @property
    def path(self) -> DraftPath:
        return DraftPath.DEVICE if self._slots.are_open() else DraftPath.HOST

    def recording(self, batch_size: int, shape: DraftShape) -> Callable[[], None]:
        """Return a function that announces the size to the draft, which records its part."""
        bounded = shape.bounded()
        size = GroupSize(batch_size, bounded.columns, bounded.max_nodes)
        return lambda: self._slots.record(size, bounded)

    @property
    def requested(self) -> bool:
        return self._host.requested

    def waits_for_host(self, entries: Seq[Entry]) -> bool:
        drafting = [entry for entry in entries if entry.shape.drafts]
        # If an output must follow a grammar, the host must see its tree before the tree is verified. If the
        # output has no tree, the host only finds masks, after it has read the previous round.
        formed = any(entry.sequence.form is not None for entry in drafting)
        self._exchanges = (
            bool(drafting)
            and not formed
            and not self._host.awaits_trees
            and self._slots.are_open()
            and self._slots.fits([group.size for group in self._groups(drafting)])
        )
        return not self._exchanges and self._host.waits_for_host(entries)

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
        self._slots.send_state()

    def receive_trees(self) -> None:
        alive = any(sequence.status is not SequenceStatus.ENDED for sequence in self._awaiting)
        self._awaiting = []
        self._slots.receive_trees(wanted=alive)

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

    def read(self, ended: Set[int], draft_s: float) -> None:
        number = self._in_flight.popleft()
        if number:
            self._slots.measure(number, draft_s)
        # Do not announce a round that can be exchanged.
        self._host.learn(ended, announces=not self._slots.are_open())
        if not self._in_flight:
            self._slots.flush()

    def ended(self, sequence: Sequence) -> None:
        self._continuous.discard(sequence.session_id)
        self._host.ended(sequence)

    def abandon(self) -> None:
        self._slots.receive_trees(wanted=False)
        self._leave(self._continuous)
        self._awaiting = []
        self._in_flight.clear()
        self._host.abandon()

    def _admit(self, entry: Entry, placed: dict[int, Entry]) -> None:
        """Leave out an entry that awaits the drafter. Remove the tree of an entry that cannot draft."""
        sequence = entry.sequence
        must_wait = sequence.controller_state is None
        reason = self._slots.obstacle(sequence.session_id, entry.shape, must_wait=must_wait)
        if reason == AWAITED:
            del placed[sequence.session_id]
        elif reason:
            self._drop(entry, placed, reason)

    def _drop(self, entry: Entry, placed: dict[int, Entry], reason: str) -> None:
        """Let an entry verify its root alone in this round."""
        placed[entry.sequence.session_id] = replace(entry, shape=NO_DRAFT)
        self._planner.fell_back(entry.sequence, reason)

    def _leave(self, session_ids: Set[int]) -> None:
        self._slots.left(list(session_ids))
        self._slots.flush()
        self._continuous = self._continuous - session_ids

    def _groups(self, drafting: Seq[Entry]) -> list[ShapeGroup]:
        return shape_groups(drafting, self._batch_sizes)

    @torch.inference_mode()
    def _draft(self, started: TreeExchange, groups: Seq[ShapeGroup], entries: Seq[Entry]) -> None:
        """Enqueue the exchange of a round, and pack the trees."""
        tried = (*((group.shape, group.size) for group in groups), self._step_runner.size_of(entries))
        ahead = tried in self._tried and self._step_runner.replays(entries)
        places = {entry.sequence.session_id: index for index, entry in enumerate(entries)}
        members = [self._members(group, places, started.refused) for group in groups]
        for state, held in zip(started.states, members, strict=True):
            gather_rows(self._step_runner, held, state.rows)
        started.exchange(self._wait_limit_s(entries), ahead)
        for index, held in enumerate(members):
            pack_drafts(self._step_runner, started.trees(index), held)
        self._tried.add(tried)

    def _members(
        self, group: ShapeGroup, places: Mapping[int, int], refused: Collection[int]
    ) -> torch.Tensor:
        """Return the index of each row's entry, ``[G] int32``. Idle rows of the group have -1."""
        held = [places[session_id] for session_id in group.session_ids if session_id not in refused]
        idle = [-1] * (group.size.batch_size - len(held))
        return upload(held + idle, torch.int32, self._pool.device)

    def _wait_limit_s(self, entries: Seq[Entry]) -> float | None:
        """Return the limit of the wait for trees, in seconds; None if all entries are in mode `on`.

        The device cannot go on without the entries that await a tree. If the round has other entries than
        those in mode `on`, limit how long these wait.
        """
        patient = all(entry.shape.drafts and entry.sequence.controller_state is None for entry in entries)
        return None if patient else self._slots.others_s


def _exchanged(group: ShapeGroup) -> ExchangedGroup:
    return ExchangedGroup(
        group.shape, group.size.batch_size, group.size.columns, group.session_ids, group.committed_upper
    )
