"""The decode loop: launches rounds of all decoding sequences, and finishes rounds and prompt chunks in order.

On a GPU, a round is enqueued before the host has read the previous round (a lookahead of 1):

    device    | round n          | round n + 1      | round n + 2
    host      launch n + 1 · wait for n · deliver n · launch n + 2 · wait for n + 1 …

The lookahead is 0 on a CPU, and if the trees of a round come from the host. The loop then reads a round
before it launches the next one.

An output may have a form, i.e. a constraint such as a JSON schema. The host must then know all earlier tokens
before the next tokens can be chosen. A round with such an output is launched as an *open* round, without the
choice of its tokens. The host completes the round as soon as it has read all earlier passes:

    device    | choose n | forward n + 1                                | choose n + 1 | …
    host      launch n + 1 · wait for n · complete n + 1 · deliver n · launch n + 2 …

Sequences join and leave between two rounds. With a lookahead of 1, the host learns one round late that a
sequence has ended. One more round may therefore contain the ended sequence. The tokens that this round
chooses for the sequence are never emitted, billed or cached.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.services.target.drafting.draft_source import DraftSource, ProposalWait
from outrider.services.target.drafting.planner import DraftPlanner
from outrider.services.target.engine.committer import Committer
from outrider.services.target.engine.prefill import Prefill, PrefillPass
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.rounds import PendingVerify, Round, StepOutput
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.policy.acceptance import SamplingKind
from outrider.services.target.policy.controller import ExecutedEntry, ExecutedStep, SpeculationController
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import Scheduler, StepPlan
from outrider.services.target.scheduling.sequence import Advance, Sequence
from outrider.shared.base.generation import RoundTrace

EMPTY_TREE, FORBIDDEN = "empty_tree", "forbidden"
"""Reasons in the trace of an entry whose tree has only its root: the draft proposed no token, or the form of
the output forbids all drafted tokens."""


class DecodeLoop:
    """Launches and finishes the rounds and prompt chunks of one engine. Engine thread only.

    Args:
        step_runner: Enqueues and reads rounds.
        prefill: Enqueues prompt chunks and finishes them.
        planner: Chooses the tree shape of each sequence.
        drafts: Supplies the draft trees.
        committer: Commits and emits tokens.
        scheduler: Reserves pages for sequences that join a round.
        controller: Learns costs and acceptance from the rounds.
        metrics: Counts rounds.
        lookahead: Number of rounds that may be in flight when the host launches the next one: 0 or 1.

    Attributes:
        num_rounds: Number of finished rounds.
    """

    def __init__(
        self,
        step_runner: StepRunner,
        prefill: Prefill,
        planner: DraftPlanner,
        drafts: DraftSource,
        committer: Committer,
        scheduler: Scheduler,
        controller: SpeculationController,
        metrics: TargetMetrics,
        lookahead: int,
    ) -> None:
        self._step_runner = step_runner
        self._prefill = prefill
        self._planner = planner
        self._drafts = drafts
        self._committer = committer
        self._scheduler = scheduler
        self._controller = controller
        self._metrics = metrics
        self._lookahead = lookahead
        self._in_flight: deque[Round | PendingVerify | PrefillPass] = deque()
        self._ahead = 0
        self._read_at = 0.0
        # Numbers of the rounds in flight in which the drafter also processes earlier tokens.
        self._catching_up: set[int] = set()
        # Per round in flight: the reasons for the traces, by session.
        self._reasons: dict[int, dict[int, str]] = {}
        self.num_rounds = 0

    @property
    def active(self) -> bool:
        """True if a pass is in flight."""
        return bool(self._in_flight)

    def launch(self, plan: StepPlan) -> None:
        """Enqueue the prompt chunks of a step, then a round of all sequences that can decode."""
        self._ahead = 0
        decodes = plan.decodes
        if plan.prefills:
            launched = self._prefill.launch(plan.prefills)
            self._in_flight.append(launched)
            decodes = [*decodes, *self._joining(launched)]
        entries = self._entries(decodes)
        if self._drafts.waits_for_host(entries):
            # The host requests these trees, for which it must know all earlier tokens.
            if any(isinstance(one, Round) for one in self._in_flight):
                self._planner.keep((entry.sequence, entry.shape) for entry in entries)
                return
            entries = [entry for entry in entries if not entry.sequence.passes_ahead]
        if entries:
            self._launch_round(entries)

    def _launch_round(self, entries: Seq[Entry]) -> None:
        """Draft and enqueue a round. Entries that await their trees are left out."""
        self._step_runner.begin()
        prepared = self._drafts.prepare(entries)
        if not prepared.entries:
            return
        for entry in prepared.entries:
            self._step_runner.table.hold(entry.sequence)
        try:
            started = self._step_runner.launch(prepared.entries, prepared.enqueue)
            self._in_flight.append(started)
            if prepared.catches_up:
                self._catching_up.add(started.number)
        finally:
            self._drafts.launched()
        for entry in prepared.entries:
            sequence = entry.sequence
            sequence.tokens_ahead += entry.columns
            sequence.passes_ahead += 1
            sequence.fresh_columns = entry.columns
            if sequence.request.speculation.trace:
                self._reasons.setdefault(started.number, {})[sequence.session_id] = sequence.stats.reason
        if prepared.may_run_ahead:
            self._ahead = self._lookahead
        self._complete()

    def finish(self) -> None:
        """Read, commit and emit the passes in flight, except for a round that may stay ahead of the host."""
        while self._in_flight and not self._stays_ahead():
            if len(self._in_flight) == 1:
                self._drafts.receive_trees()
            first = self._in_flight.popleft()
            assert not isinstance(first, PendingVerify), "a round is completed when it becomes the first"
            self._finish(first)

    def drain(self) -> None:
        """Finish all passes in flight."""
        self._ahead = 0
        self.finish()

    def abandon(self) -> None:
        """Forget all passes after a failure that has ended all sequences."""
        self._in_flight.clear()
        self._catching_up.clear()
        self._reasons.clear()
        self._planner.keep(())
        self._drafts.abandon()

    def _stays_ahead(self) -> bool:
        return isinstance(self._in_flight[0], Round) and len(self._in_flight) <= self._ahead

    def _complete(self) -> None:
        """Complete a pending round once the host has read all earlier passes."""
        if self._in_flight and isinstance(self._in_flight[0], PendingVerify):
            self._in_flight[0] = self._step_runner.complete(self._in_flight[0])

    def _joining(self, launched: PrefillPass) -> list[Sequence]:
        """Return the sequences with a complete prompt that can take part in a round immediately."""
        return [
            sequence
            for sequence, _ in launched.completed
            if sequence.paused_at is None
            and sequence.remaining > sequence.passes_ahead
            and self._scheduler.reserve_ahead(sequence, sequence.committed_upper)
        ]

    def _entries(self, decodes: Seq[Sequence]) -> list[Entry]:
        if not decodes:
            return []
        shapes = self._planner.shapes(decodes, self._drafts.path, requested=self._drafts.requested)
        columns = self._step_runner.table.columns
        return [
            Entry(sequence, sequence.residence, shape, sequence.epoch, columns)
            for sequence, shape in zip(decodes, shapes, strict=True)
        ]

    def _finish(self, launched: Round | PrefillPass) -> None:
        if isinstance(launched, PrefillPass):
            self._prefill.finish(launched, self._read_at)
            self._complete()
        else:
            self._finish_round(self._step_runner.read(launched))
        self._read_at = time.monotonic()

    def _finish_round(self, finished: StepOutput) -> None:
        # 1. Commit: advance each sequence and tell the drafter.
        steps: list[tuple[int, Outcome, Advance, int]] = []
        executed: list[ExecutedEntry] = []
        entries = finished.round.entries
        reasons = self._reasons.pop(finished.round.number, {})
        for index, (entry, outcome) in enumerate(zip(entries, finished.outcomes, strict=True)):
            if entry.void:
                continue
            sequence = entry.sequence
            sequence.tokens_ahead -= entry.columns
            sequence.passes_ahead -= 1
            assert outcome is not None, "a sequence that continues must have an outcome"
            base_len, stores_features = sequence.committed_len, sequence.has_features
            step = self._committer.accept(sequence, outcome.emitted)
            executed.append(_executed(entry, outcome))
            if step is None:
                continue
            if stores_features:
                sequence.feature_len += len(step.kept)
            sequence.cached_len += len(step.kept)
            if step.finish is None:
                self._drafts.committed(entry, step.kept, outcome)
            steps.append((index, outcome, step, base_len))
        self.num_rounds += 1
        # 2. Let the drafter begin with the next round, before anything that can wait.
        ended = {entries[index].sequence.session_id for index, _, step, _ in steps if step.finish}
        self._drafts.read(ended, finished.draft_s)
        # 3. Complete the next round, before the device has ended its forward pass.
        self._complete()
        # 4. Emit the tokens.
        wait = self._drafts.take_wait()
        draft_s = finished.draft_s if wait is None else wait.draft_s
        for index, outcome, step, base_len in steps:
            sequence = entries[index].sequence
            sequence.stats.record(outcome.num_nodes, len(outcome.accepted), step.num_cut)
            trace = None
            if sequence.request.speculation.trace:
                trace = self._trace(finished, index, outcome, step, base_len, draft_s)
                reason = reasons.get(sequence.session_id, "")
                if entries[index].shape.drafts and outcome.num_nodes == 1:
                    reason = FORBIDDEN if sequence.form is not None else EMPTY_TREE
                trace = replace(trace, reason=reason)
            logprobs = finished.round.logprobs_of(index, len(step.kept))
            states = finished.round.states_of(index, base_len - 1, len(step.kept))
            self._committer.emit(sequence, step, trace, logprobs, states, outcome)
        # 5. Feed the timings to the controller and the metrics.
        caught_up = finished.round.number in self._catching_up
        self._catching_up.discard(finished.round.number)
        if executed:
            self._observe(finished, executed, wait, caught_up)

    def _observe(
        self,
        finished: StepOutput,
        executed: list[ExecutedEntry],
        wait: ProposalWait | None,
        caught_up: bool,
    ) -> None:
        provisional = finished.round.provisional
        if wait is None:
            groups = Counter(one.shape for one in executed if one.shape.drafts)
            draft_s = finished.draft_s if groups else 0.0
            step = ExecutedStep(
                executed,
                groups,
                draft_s,
                finished.verify_s,
                finished.seconds,
                DraftPath.DEVICE,
                caught_up,
                provisional,
            )
        else:
            step = ExecutedStep(
                executed,
                wait.requested,
                wait.wait_s,
                finished.seconds,
                wait.wait_s + finished.seconds,
                DraftPath.HOST,
                caught_up,
                provisional,
            )
        saved_s = self._controller.observe(step)
        if saved_s > 0:
            self._drafts.saved(saved_s)
        self._metrics.observe_round(step, finished.draft_s, wait.answer_s if wait else None)

    def _trace(
        self,
        finished: StepOutput,
        index: int,
        outcome: Outcome,
        step: Advance,
        base_len: int,
        draft_s: float,
    ) -> RoundTrace:
        return RoundTrace(
            round=finished.round.number,
            base_len=base_len,
            nodes=finished.round.trace_of(index, outcome.num_nodes),
            accepted=outcome.accepted,
            emitted=step.kept,
            draft_ms=draft_s * 1e3 if outcome.num_nodes > 1 else 0.0,
            verify_ms=finished.verify_s * 1e3,
        )


def _executed(entry: Entry, outcome: Outcome) -> ExecutedEntry:
    sequence = entry.sequence
    return ExecutedEntry(
        sequence.controller_state,
        outcome.num_nodes,
        entry.shape,
        len(outcome.accepted),
        SamplingKind.of(sequence.request.sampling),
    )
