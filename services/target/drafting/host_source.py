"""Requests draft trees through the host: from n-grams, or from a draft in another process.

A round with such trees can start only after the host has read the previous round:

    target device   | verify n      |                       | verify n + 1
    host            wait for n · commit n, announce n + 1 · deliver n … wait for the trees · launch n + 1
    remote draft                           | extend by n, draft n + 1  |

A draft in another process idles until the next round is announced. The host therefore announces this round as
soon as it has read the previous round. If no sequence drafts in a round, the host enqueues the round before
it has read the previous round. The drafter receives the tokens of such a round later, in larger commits.

If the tree of a sequence in mode `on` is late, only this sequence waits. Rounds run without the sequence
until the tree arrives or the wait ends. A stopped draft therefore delays only sequences in mode `on`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from collections.abc import Set
from dataclasses import dataclass, replace

import torch

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.drafting.draft_source import DraftSource, PreparedDrafts, ProposalWait
from outrider.services.target.drafting.planner import DraftPlanner, bound_of
from outrider.services.target.drafting.shape_groups import pack_drafts
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import PrefillChunk, Scheduler
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.kv.upload import upload
from outrider.shared.spec.drafter import (
    AWAITED,
    Commit,
    Commits,
    Drafter,
    ProposalRequest,
    ProposalRow,
)
from outrider.shared.spec.tree import NO_DRAFT, DraftBatch, DraftShape

CATCH_UP_TOKENS = 128
"""Number of unsent tokens of a sequence after which even rounds without drafts send a commit to the
drafter."""
ANSWERED = ("", "empty_tree")
"""Fallback reasons of a drafter that has answered, but with a single-node tree."""


@dataclass(frozen=True, slots=True)
class _Proposal:
    """An announced request for trees.

    Attributes:
        request: The request as sent to the drafter.
        announced_at: Time of the announcement, from `time.monotonic()`.
    """

    request: ProposalRequest
    announced_at: float

    def among(self, session_ids: Set[int]) -> _Proposal | None:
        """Return the part of the proposal for these sessions; None if the proposal has none of them."""
        rows = [row for row in self.request.rows if row.fence.session_id in session_ids]
        if len(rows) == len(self.request.rows):
            return self
        return replace(self, request=replace(self.request, rows=rows)) if rows else None

    def without(self, session_id: int) -> _Proposal | None:
        """Return the proposal without a session that the drafter has forgotten or reopened."""
        return self.among({row.fence.session_id for row in self.request.rows} - {session_id})


class HostSource(DraftSource):
    """Draft source that requests trees from a drafter through the host. Engine thread only.

    Args:
        drafter: Proposes trees.
        sessions: The drafter's sessions.
        planner: Chooses the tree shapes of the next round, so that the round can be announced early.
        scheduler: Lists the sequences that decode next.
        controller: Limits the wait for trees, and records how long the drafter takes.
        step_runner: Owns the slots and the packed trees.
    """

    def __init__(
        self,
        drafter: Drafter,
        sessions: DraftSessions,
        planner: DraftPlanner,
        scheduler: Scheduler,
        controller: SpeculationController,
        step_runner: StepRunner,
    ) -> None:
        self._drafter = drafter
        self._sessions = sessions
        self._planner = planner
        self._scheduler = scheduler
        self._controller = controller
        self._step_runner = step_runner
        self._round = 0
        self._announced: _Proposal | None = None
        self._told: dict[int, int] = {}
        # Sequences with new tokens since the last `read`, by session.
        self._moved: dict[int, Sequence] = {}
        # Sessions that the last round has left out, because they await their trees.
        self._left_out: set[int] = set()
        self._wait: ProposalWait | None = None

    @property
    def path(self) -> DraftPath:
        return DraftPath.HOST

    @property
    def requested(self) -> bool:
        return self._announced is not None

    def waits_for_host(self, entries: Seq[Entry]) -> bool:
        return any(entry.shape.drafts for entry in entries)

    def prepare(self, entries: Seq[Entry]) -> PreparedDrafts:
        # 1. Request the trees, unless the early announcement has done so.
        announced, self._announced = self._announced, None
        present = {entry.sequence.session_id for entry in entries}
        proposal = None if announced is None else announced.among(present)
        wanting = [(entry.sequence, entry.shape) for entry in entries if entry.shape.drafts]
        if not wanting:
            return PreparedDrafts(entries, None)
        if proposal is None:
            proposal = self._announce(wanting, len(entries))
        # 2. Collect the trees. An entry without a tree verifies its root alone, or is left out of the round.
        started, rows = time.monotonic(), proposal.request.rows
        drafts = self._drafter.propose(proposal.request)
        num_nodes, depths = drafts.num_nodes.tolist(), drafts.depths.amax(dim=1).tolist()
        placed = {
            entry.sequence.session_id: replace(entry, shape=NO_DRAFT) if entry.shape.drafts else entry
            for entry in entries
        }
        resumed, self._left_out = self._left_out, set()
        for row, nodes, depth in zip(rows, num_nodes, depths, strict=True):
            session_id = row.fence.session_id
            if nodes > 1:
                # The shape of the answer, which may have fewer levels and nodes than requested.
                shape = replace(row.shape, depth=depth, max_nodes=nodes)
                placed[session_id] = replace(placed[session_id], shape=shape)
                continue
            reason = self._drafter.fallback_reason(session_id) or "no_proposal"
            if reason == AWAITED:
                self._left_out.add(session_id)
                del placed[session_id]
            else:
                self._planner.fell_back(placed[session_id].sequence, reason)
        answered, wait_s = max(num_nodes) > 1, time.monotonic() - started
        if not self._left_out and resumed.isdisjoint(row.fence.session_id for row in rows):
            self._measure(proposal, wait_s, drafts.draft_ms / 1e3, answered=answered)
        running = list(placed.values())
        if not answered:
            return PreparedDrafts(running, None, may_run_ahead=False)
        indices = {session_id: index for index, session_id in enumerate(placed)}
        members = [
            indices[row.fence.session_id] if nodes > 1 else -1
            for row, nodes in zip(rows, num_nodes, strict=True)
        ]
        return PreparedDrafts(running, lambda: self._pack(drafts, members), may_run_ahead=False)

    def take_wait(self) -> ProposalWait | None:
        wait, self._wait = self._wait, None
        return wait

    def saved(self, seconds: float) -> None:
        self._drafter.saved(seconds)

    def prefilled(self, chunk: PrefillChunk) -> None:
        """Send the stored feature rows of a chunk, without the prompt's last row."""
        self._sessions.send_prefill_features(chunk)
        sequence = chunk.sequence
        if sequence.drafted and sequence.remaining > 1:
            self._drafter.absorb([sequence.session_id])

    def first_token(self, sequence: Sequence, token: int) -> None:
        self._told[sequence.session_id] = sequence.committed_len - 1
        self._moved[sequence.session_id] = sequence

    def committed(self, entry: Entry, kept: Seq[int], outcome: Outcome) -> None:
        sequence = entry.sequence
        self._told.setdefault(sequence.session_id, sequence.committed_len - len(kept))
        self._moved[sequence.session_id] = sequence

    def read(self, ended: Set[int], draft_s: float) -> None:
        self.learn(ended, announces=True)

    def learn(self, ended: Set[int], *, announces: bool) -> None:
        """Process a round whose tokens were passed to `committed`. Announce the next round if asked to.

        Args:
            ended: Ids of the drafter's sessions that end with this round and were not closed yet.
            announces: True to announce the next round to the drafter if no round is in flight.
        """
        self._round += 1
        moved, self._moved = self._moved, {}
        late = [
            one
            for one in moved.values()
            if one.session_id not in ended
            and one.committed_len - self._told[one.session_id] >= CATCH_UP_TOKENS
        ]
        if not announces or any(one.passes_ahead for one in self._scheduler.active):
            self.commit(late)
            return
        # No round is in flight, so the next round may draft. Announce it before any work that can wait.
        decodes = [one for one in self._scheduler.decoding() if one.session_id not in ended]
        planned = list(zip(decodes, self._planner.shapes(decodes, DraftPath.HOST), strict=True))
        self._planner.keep(planned)
        wanting = [(one, shape) for one, shape in planned if shape.drafts]
        if wanting:
            self._announced = self._announce(wanting, len(decodes))
        self.commit(late)

    def ended(self, sequence: Sequence) -> None:
        for by_session in (self._told, self._moved):
            by_session.pop(sequence.session_id, None)
        self._planner.forget(sequence)
        if self._announced is not None:
            self._announced = self._announced.without(sequence.session_id)

    def abandon(self) -> None:
        self._announced, self._wait = None, None
        self._left_out.clear()
        self._told.clear()
        self._moved.clear()

    def _announce(self, wanting: Seq[tuple[Sequence, DraftShape]], batch_size: int) -> _Proposal:
        """Send the tokens that the drafter lacks, then request trees."""
        self.commit([sequence for sequence, _ in wanting])
        auto = [bound_of(one) for one, _ in wanting if one.controller_state is not None]
        request = ProposalRequest(
            round=self._round,
            rows=[
                ProposalRow(
                    sequence.fence(), sequence.tokens[-1], shape, must_wait=sequence.controller_state is None
                )
                for sequence, shape in wanting
            ],
            deadline_s=self._controller.wait_cap_s(auto, batch_size) if auto else None,
            has_other_rows=batch_size > len(wanting),
        )
        announced_at = time.monotonic()
        self._drafter.announce(request)
        return _Proposal(request, announced_at)

    @property
    def awaits_trees(self) -> bool:
        """True if the drafter is working on an announced round, or on trees of omitted entries."""
        return self._announced is not None or bool(self._left_out)

    def lacks(self, sequence: Sequence, base_len: int) -> None:
        """Record that the drafter needs a commit from `base_len` on before it can draft through the host."""
        self._told[sequence.session_id] = base_len

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Send each sequence's tokens that the drafter lacks, with their stored feature rows."""
        commits: list[Commit] = []
        for sequence in sequences:
            told = self._told.get(sequence.session_id)
            if told is None:
                continue
            commit = self._sessions.catch_up(sequence, told)
            self._told[sequence.session_id] = sequence.committed_len
            if commit is not None:
                commits.append(commit)
        if commits:
            self._drafter.commit(Commits(self._round, commits))

    def _measure(self, proposal: _Proposal, wait_s: float, draft_s: float, *, answered: bool) -> None:
        """Report a wait to the controller if the wait measures the cost of a proposal.

        A wait measures nothing if it ended before its deadline without an answer from the drafter.
        """
        rows, deadline_s = proposal.request.rows, proposal.request.deadline_s
        late = deadline_s is not None and wait_s >= deadline_s
        replied = answered or any(
            self._drafter.fallback_reason(row.fence.session_id) in ANSWERED for row in rows
        )
        if late or replied:
            # Without an answer, the draft would have needed longer than the measured time, so count that time
            # double.
            taken = time.monotonic() - proposal.announced_at
            self._wait = ProposalWait(wait_s, taken, Counter(row.shape for row in rows), draft_s)
            self._controller.costs.observe_answer(taken * (1.0 if answered else 2.0))

    def _pack(self, drafts: DraftBatch, members: list[int]) -> None:
        device = self._step_runner.batch.nodes.device
        tokens, parents, depths, num_nodes, ancestors = (
            part.to(device, non_blocking=True)
            for part in (drafts.tokens, drafts.parents, drafts.depths, drafts.num_nodes, drafts.ancestors)
        )
        logprobs = None if drafts.logprobs is None else drafts.logprobs.to(device, non_blocking=True)
        moved = DraftBatch(tokens, parents, depths, num_nodes, ancestors, logprobs)
        pack_drafts(self._step_runner, moved, upload(members, torch.int32, device))
