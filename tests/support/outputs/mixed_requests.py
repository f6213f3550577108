"""An engine that serves drawn mixtures of requests, and checks every round that it launches.

`drawn_requests` draws the requests, the events and the limits of the engine. Nothing depends on measured
times: a seeded generator takes the place of the controller, and the prefill budget is a drawn number of
tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from unittest import mock

from outrider.services.target.engine.committer import Committer
from outrider.services.target.engine.inbox import Submit
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.model.packed_batch import Entry
from outrider.services.target.model.prefill_graph import PromptRows
from outrider.services.target.model.step_runner import Round
from outrider.services.target.policy.controller import EntryBound
from outrider.services.target.policy.cost_model import DraftPath, StepCosts
from outrider.services.target.policy.offered_shapes import cut
from outrider.services.target.scheduling.scheduler import PrefillChunk
from outrider.services.target.scheduling.sequence import Advance
from outrider.services.target.scheduling.sequence import Sequence as TargetSequence
from outrider.shared.base.generation import RoundTrace
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates
from outrider.shared.nn.decoder import Decoder
from outrider.shared.spec.drafter import DrafterState, FeatureSpec, ProposalRow
from outrider.shared.spec.tree import NO_DRAFT, DraftShape
from support.engine.device_toys import AnswerDrafter
from support.engine.played_graphs import PlayedGraphs
from support.engine.target_harness import Harness, Node, make_harness
from support.outputs.drawn_requests import LONGEST, PROMPTS, VOCAB, Asked, Machine

BROKEN_CHANCE = 0.3
"""Probability that a drafter on the host answers with a random tree, or with no tree."""
KEEPS_TREE_CHANCE = 0.8
"""Probability that an entry of a fixed shape keeps its tree in a round that limits such trees."""


@dataclass
class Service:
    """An engine that serves requests in the test's thread.

    Attributes:
        sequences: The engine's sequences by request id.
        prefilled: Number of tokens that prefills have emitted, by request id.
        seen: What has happened, for tests that assert that they cover it.
    """

    decoder: Decoder
    plan: LoopPlan
    machine: Machine
    drafter: AnswerDrafter
    harness: Harness = field(init=False)
    sequences: dict[str, TargetSequence] = field(default_factory=dict)
    prefilled: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        machine, drafter = self.machine, self.drafter
        self._rng = random.Random(machine.seed)
        self._lost = dict.fromkeys(machine.losses)
        drafter.refuse_every = machine.refuse_every
        drafter.plan = self._host_tree
        self.harness = make_harness(
            self.decoder,
            drafter,
            plan=replace(self.plan, max_packed_rows=machine.max_packed_rows),
            max_running=machine.max_running,
            page_size=machine.page_size,
            num_pages=-(-(LONGEST + machine.spare_slots) // machine.page_size),
            prefill_chunk=machine.prefill_chunk,
            graphs=PromptGraphs(),
            prefill_sizes=machine.prefill_sizes,
        )
        self.harness.engine.recordings.rounds(())  # adopts the draft, whose features the graphs store
        for size in machine.prefill_sizes:
            self.harness.runner.capture_prefill(size)
        # Slots that no one has written contain large numbers, so that reading them changes tokens.
        for plane in self.harness.runner.pool.planes():
            plane.normal_(0.0, 1e3)

    def serve(self, asked: Sequence[Asked], stops: Sequence[frozenset[int]]) -> None:
        """Serve requests to their ends. `stops` are their stop tokens."""
        engine, handles = self.harness.engine, dict[int, int]()
        loop, controller = engine._loop, engine.controller
        committer = mock.patch.object(loop._prefill, "_committer", _Counting(loop._committer, self.prefilled))
        launch = mock.patch.object(loop._step_runner, "launch", self._checked(loop._step_runner.launch))
        budget = mock.patch.object(engine._budget, "tokens", return_value=self.machine.prefill_budget)
        choice = mock.patch.object(controller, "choose", self._choose)
        share = mock.patch.object(engine._planner._share, "choose", self._share)
        recorded = self.harness.runner._recorded
        assert recorded is not None
        prompts = mock.patch.object(recorded, "run", self._noted(recorded.run))
        with ExitStack() as patches:
            patches.enter_context(committer)
            patches.enter_context(launch)
            patches.enter_context(budget)
            patches.enter_context(choice)
            patches.enter_context(share)
            # Nothing depends on whether a plain round was measured.
            patches.enter_context(mock.patch.object(StepCosts, "measured_plain", new=True))
            patches.enter_context(prompts)
            last = max(one.joins + max((one.cancels or (0,))[0], sum(one.pauses or (0,))) for one in asked)
            step = 0
            while step <= last or engine.has_work():
                self._events(step, asked, stops, handles)
                if engine.has_work():
                    self.harness.step()
                step += 1
                assert step < 5000, "the engine must become idle"
        self.seen["retractions"] += self.harness.scheduler.num_retractions

    def check_idle(self) -> None:
        """Assert that no page, slot, session or pass is left."""
        harness = self.harness
        harness.check_idle()
        assert sorted(harness.scheduler._free_slots) == list(range(self.machine.max_running))
        assert not harness.engine.num_live
        assert not harness.engine._loop.active
        assert not self.drafter.sequences, "every session must be closed"
        assert not harness.sink.failed

    def _events(
        self,
        step: int,
        asked: Sequence[Asked],
        stops: Sequence[frozenset[int]],
        handles: dict[int, int],
    ) -> None:
        engine, drafter = self.harness.engine, self.drafter
        for index, one in enumerate(asked):
            if step == one.joins:
                handles[index] = self._submit(index, one, stops[index])
            if one.cancels is not None and step == one.joins + one.cancels[0]:
                engine.cancel(handles[index], one.cancels[1])
            if one.pauses is not None:
                start = one.joins + one.pauses[0]
                if step == start:
                    engine.pause(handles[index])
                if step == start + one.pauses[1]:
                    engine.resume(handles[index])
        if step in self.machine.losses and drafter.sequences:
            drafter.lost.append(self._rng.choice(sorted(drafter.sequences)))
            self.seen["losses"] += 1
        if step in self.machine.changes and not self.plan.drafts_on_device:
            # A drafter on the device stays until the target ends.
            names, size = ("other", 1) if drafter.spec.fingerprint != "other" else ("raw", 3)
            layers = tuple(range(1, 1 + size))
            width = size * self.decoder.config.hidden_size
            drafter.spec = FeatureSpec(aux_layer_ids=layers, feature_size=width, fingerprint=names)
            self.seen["draft changes"] += bool(drafter.sequences)
        first, stop = self.machine.down
        drafter.current_state = DrafterState.DOWN if first <= step < stop else DrafterState.ON

    def _submit(self, index: int, one: Asked, stops: frozenset[int]) -> int:
        handle = self.harness.submit(
            PROMPTS[one.prompt],
            one.new_tokens,
            request_id=str(index),
            sampling=one.sampling,
            mode=one.mode,
            shape=one.shape,
            trace=one.trace,
            stop=sorted(stops),
            priority=one.priority,
            logprobs=one.logprobs,
            states=one.states,
            grammar=one.grammar,
        )
        message = self.harness.engine._inbox[-1]
        assert isinstance(message, Submit)
        self.sequences[str(index)] = message.sequence
        return handle

    def _checked(
        self, launch: Callable[[Sequence[Entry], Callable[[], None] | None], Round]
    ) -> Callable[[Sequence[Entry], Callable[[], None] | None], Round]:
        """Return `StepRunner.launch` with checks of the round's entries."""
        loop, scheduler = self.harness.engine._loop, self.harness.scheduler

        def checked(entries: Sequence[Entry], draft: Callable[[], None] | None) -> Round:
            assert entries
            assert sum(isinstance(one, Round) for one in loop._in_flight) <= self.plan.lookahead
            assert sum(entry.rows for entry in entries) <= loop._step_runner.max_rows
            slots = [entry.sequence.slot for entry in entries]
            assert len(set(slots)) == len(slots)
            assert all(0 <= slot < self.machine.max_running for slot in slots)
            for entry in entries:
                sequence = entry.sequence
                assert sequence in scheduler.active
                # The last slot that the round may write is inside the lease.
                assert sequence.committed_upper - 1 + entry.rows <= sequence.reserved_len
                limit = sequence.request.speculation
                assert entry.rows <= max(limit.shape.max_nodes, limit.chain.max_nodes)
            shapes = {entry.shape for entry in entries}
            self.seen["mixed"] += len(shapes) > 1
            self.seen["trees"] += sum(shape.drafts for shape in shapes) > 1
            self.seen["drafts on the device"] += draft is not None and self.plan.drafts_on_device
            self.seen["drafts through the host"] += draft is not None and not self.plan.drafts_on_device
            return launch(entries, draft)

        return checked

    def _noted(
        self, run: Callable[[Sequence[PrefillChunk], bool], PromptRows]
    ) -> Callable[[Sequence[PrefillChunk], bool], PromptRows]:
        """Return `PrefillGraph.run` that notes what it packs."""

        def noted(chunks: Sequence[PrefillChunk], captures: bool) -> PromptRows:
            self.seen["recorded prompts"] += 1
            self.seen["packed prompts"] += len(chunks) > 1
            self.seen["recorded chunks behind others"] += any(chunk.start for chunk in chunks)
            return run(chunks, captures)

        return noted

    def _choose(
        self, entries: Sequence[EntryBound], others: Sequence[DraftShape], path: DraftPath
    ) -> list[DraftShape]:
        """Choose shapes at random in the controller's place."""
        chosen = []
        for entry in entries:
            form = self._rng.choice(entry.forms)
            chosen.append(self._rng.choice([NO_DRAFT, form, cut(form, self._rng.randint(1, form.depth))]))
        return chosen

    def _share(
        self, session_ids: list[int], base_s: float, round_s: Callable[[Sequence[int]], float]
    ) -> set[int]:
        """Choose at random which entries of fixed shapes draft, in place of the measured bound."""
        chosen = {session_id for session_id in session_ids if self._rng.random() < KEEPS_TREE_CHANCE}
        self.seen["bounded trees"] += len(session_ids) - len(chosen)
        return chosen

    def _host_tree(self, tokens: list[int], row: ProposalRow) -> list[Node]:
        """Return the tree of a drafter on the host, which is sometimes random or missing."""
        if self._rng.random() >= BROKEN_CHANCE:
            return self.drafter._host_tree(tokens, row)
        count = self._rng.randrange(row.shape.max_nodes)
        return [(self._rng.randrange(VOCAB), self._rng.randrange(index + 1)) for index in range(count)]


class PromptGraphs(PlayedGraphs):
    """Records passes over prompts. Rounds run unrecorded."""

    def due(self, key: Hashable, counted_as: Hashable | None = None) -> bool:
        return False


class _Counting(Committer):
    """A committer that counts the tokens that prefills emit."""

    def __init__(self, committer: Committer, counts: Counter[str]) -> None:
        self._inner = committer
        self._counts = counts

    def accept(self, sequence: TargetSequence, emitted: Sequence[int]) -> Advance | None:
        return self._inner.accept(sequence, emitted)

    def emit(
        self,
        sequence: TargetSequence,
        step: Advance,
        trace: RoundTrace | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        self._counts[sequence.request.request_id] += len(step.kept)
        self._inner.emit(sequence, step, trace, logprobs)

    def emit_prompt(self, sequence: TargetSequence, logprobs: Sequence[TokenLogprob]) -> None:
        self._inner.emit_prompt(sequence, logprobs)

    def emit_states(self, sequence: TargetSequence, states: TokenStates) -> None:
        self._inner.emit_states(sequence, states)
