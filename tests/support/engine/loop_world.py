"""A decode loop whose neighbours are replaced by one object that notes their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any

import torch

from outrider.services.target.drafting.draft_source import PreparedDrafts, ProposalWait
from outrider.services.target.engine.decode_loop import DecodeLoop
from outrider.services.target.engine.prefill import PrefillPass
from outrider.services.target.model.outcome import FAILED_TOKEN, Outcome
from outrider.services.target.model.packed_batch import Entry, SamplingMode
from outrider.services.target.model.rounds import Marks, PendingVerify, Round, StepOutput
from outrider.services.target.model.verify_pass import PassSize
from outrider.services.target.policy.controller import ExecutedStep
from outrider.services.target.policy.cost_model import DraftPath
from outrider.services.target.scheduling.scheduler import PrefillChunk, StepPlan
from outrider.services.target.scheduling.sequence import Advance
from outrider.services.target.scheduling.sequence import Sequence as EngineSequence
from outrider.shared.base.generation import RoundTrace
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates
from outrider.shared.kv.pool import KVPool
from outrider.shared.spec.tree import NO_DRAFT, DraftShape
from support.engine.slot_sequences import seated_sequence


class LoopWorld:
    """A decode loop whose neighbours note their calls in one log.

    Attributes:
        log: The calls in order.
        shapes: The shape of each session; `NO_DRAFT` by default.
        emits: For each session, the tokens that its next rounds emit. By default, a round emits token 7.
        waits: Whether rounds with drafts wait for the host.
        catches_up: Whether drafts include work on earlier tokens.
        may_run_ahead: Whether rounds that drafted may run ahead.
        opens: Whether rounds are open until they are completed.
        wait: The next result of `take_wait`.
        saved_s: The time that each round saves, as the controller reports it.
    """

    def __init__(self, lookahead: int) -> None:
        self.log: list[str] = []
        self.shapes: dict[int, DraftShape] = {}
        self.emits: dict[int, list[list[int]]] = {}
        self.waits = False
        self.may_run_ahead = True
        self.catches_up = False
        self.opens = False
        self.wait: ProposalWait | None = None
        self.saved_s = 0.0
        self.fails: Exception | None = None
        self.observed: list[ExecutedStep] = []
        self.traces: list[RoundTrace] = []
        self.pool = KVPool(256, 4, 1, 1, 2, torch.float32, "cpu")
        self._launched = 0
        self.table = SimpleNamespace(columns=17, hold=lambda one: self.log.append(f"hold {one.session_id}"))
        neighbours: Any = self
        metrics: Any = SimpleNamespace(observe_round=lambda *given: self.log.append("metrics"))
        prefill: Any = Prompts(self)
        planner: Any = SimpleNamespace(
            keep=lambda planned: self.log.append("postponed"),
            shapes=lambda decodes, path, requested: [
                self.shapes.get(one.session_id, NO_DRAFT) for one in decodes
            ],
        )
        step_runner: Any = SimpleNamespace(
            table=self.table,
            begin=lambda: None,
            launch=self._launch,
            complete=self._complete,
            read=self._read,
        )
        self.loop = DecodeLoop(
            step_runner, prefill, planner, neighbours, neighbours, neighbours, neighbours, metrics, lookahead
        )

    def sequence(self, session_id: int, **options: Any) -> EngineSequence:
        made = seated_sequence(self.pool, session_id, session_id, **options)
        made.tokens.append(1)
        return made

    def step(self, *decodes: EngineSequence, prefills: Sequence[PrefillChunk] = ()) -> None:
        self.loop.launch(StepPlan([], [], list(prefills), list(decodes)))
        self.loop.finish()

    # ---- round runner

    def _launch(self, entries: Sequence[Entry], draft: Callable[[], None] | None) -> Round | PendingVerify:
        if self.fails is not None:
            raise self.fails
        self._launched += 1
        self.log.append(f"launch {self._launched}")
        if self.opens:
            size = PassSize(len(entries), 1, SamplingMode.FULL, capture=False, masked=True)
            return PendingVerify(self._launched, tuple(entries), [], 0.0, size, None, 0)
        return self._round(self._launched, entries)

    def _complete(self, opened: PendingVerify) -> Round:
        self.log.append(f"complete {opened.number}")
        return self._round(opened.number, opened.entries)

    def _round(self, number: int, entries: Sequence[Entry]) -> Round:
        nodes = torch.zeros((4, 8), dtype=torch.int32)
        marks = Marks(0.0, 0.25, 1.0)
        starts = [sum(entry.rows for entry in entries[:index]) for index in range(len(entries))]
        return Round(number, tuple(entries), starts, 0.0, torch.empty(0), nodes, marks)

    def _read(self, launched: Round) -> StepOutput:
        self.log.append(f"read {launched.number}")
        outcomes: list[Outcome | None] = []
        for entry in launched.entries:
            emitted = (self.emits.get(entry.sequence.session_id) or [[7]]).pop(0)
            outcomes.append(Outcome(entry.rows, list(range(1, len(emitted))), emitted))
        return StepOutput(launched, outcomes, 1.5, 0.25, 0.75)

    # ---- draft source

    path = DraftPath.DEVICE

    requested = False

    def waits_for_host(self, entries: Sequence[Entry]) -> bool:
        return self.waits and any(entry.shape.drafts for entry in entries)

    def prepare(self, entries: Sequence[Entry]) -> PreparedDrafts:
        ids = " ".join(str(entry.sequence.session_id) for entry in entries)
        self.log.append(f"prepare {ids}")
        return PreparedDrafts(entries, None, may_run_ahead=self.may_run_ahead, catches_up=self.catches_up)

    def launched(self) -> None:
        self.log.append("launched")

    def receive_trees(self) -> None:
        self.log.append("receive trees")

    def take_wait(self) -> ProposalWait | None:
        return self.wait

    def saved(self, seconds: float) -> None:
        self.log.append(f"saved {seconds}")

    def first_token(self, sequence: EngineSequence, token: int) -> None:
        self.log.append(f"first {sequence.session_id}")

    def committed(self, entry: Entry, kept: Sequence[int], outcome: Outcome) -> None:
        self.log.append(f"committed {entry.sequence.session_id} {list(kept)}")

    def read(self, ended: AbstractSet[int], draft_s: float) -> None:
        self.log.append(f"drafts read {sorted(ended)}")

    def abandon(self) -> None:
        self.log.append("abandon")

    # ---- committer

    def accept(self, sequence: EngineSequence, emitted: Sequence[int]) -> Advance | None:
        self.log.append(f"accept {sequence.session_id}")
        if emitted[-1] == FAILED_TOKEN:
            sequence.slot = -1
            return None
        return sequence.advance(list(emitted))

    def emit(
        self,
        sequence: EngineSequence,
        step: Advance,
        trace: RoundTrace | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        states: TokenStates | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        self.log.append(f"emit {sequence.session_id} {step.kept}")
        if trace is not None:
            self.traces.append(trace)

    # ---- scheduler and controller

    def reserve_ahead(self, sequence: EngineSequence, committed_upper: int) -> bool:
        return True

    def observe(self, step: ExecutedStep) -> float:
        self.log.append("observe")
        self.observed.append(step)
        return self.saved_s


class Prompts:
    """Stands for the prefill."""

    def __init__(self, world: LoopWorld) -> None:
        self.world = world

    def launch(self, chunks: Sequence[PrefillChunk]) -> PrefillPass:
        self.world.log.append("prefill")
        completed = [chunk.sequence for chunk in chunks if chunk.is_last]
        for sequence in completed:
            sequence.tokens_ahead = sequence.passes_ahead = 1
        chosen: Any = None
        return PrefillPass([(one, one.residence) for one in completed], chosen, 1, 1, 0.0)

    def finish(self, launched: PrefillPass, previous_end: float) -> None:
        self.world.log.append("prefilled")
        for sequence, _residence in launched.completed:
            sequence.tokens.append(1)
            sequence.tokens_ahead -= 1
            sequence.passes_ahead -= 1


def passes(log: list[str]) -> list[str]:
    """Return the launches, completions and reads among the calls."""
    return [line for line in log if line.split()[0] in ("launch", "complete", "read", "prefill", "prefilled")]
