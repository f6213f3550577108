"""The target's engine and its `step`: receive, adopt a changed draft, schedule, launch, finish, flush.

A step enqueues prompt chunks and one round of all decoding sequences. Then it reads the passes that were
enqueued earlier, and delivers their tokens. A sequence without draft nodes takes part in the round with one
packed row.

All state belongs to the engine thread. Other threads only append commands to the engine's inbox.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from outrider.services.target.drafting.create import make_draft_source
from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.drafting.planner import DraftPlanner
from outrider.services.target.engine.committer import Committer, no_token_error
from outrider.services.target.engine.decode_loop import DecodeLoop
from outrider.services.target.engine.engine_stats import EngineStats
from outrider.services.target.engine.expiry import Expiry
from outrider.services.target.engine.inbox import Cancel, FlushPrefixes, Pause, Submit
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.engine.output_processor import OutputProcessor
from outrider.services.target.engine.prefill import Prefill
from outrider.services.target.engine.recorder import GraphRecorder
from outrider.services.target.engine.recordings import Recordings
from outrider.services.target.engine.resources import measure_resources
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.policy.acceptance import SamplingKind
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.policy.prefill_budget import PrefillBudget
from outrider.services.target.request import EngineRequest, EventSink
from outrider.services.target.scheduling.limits import EngineLimits
from outrider.services.target.scheduling.scheduler import Scheduler, StepPlan
from outrider.services.target.scheduling.sequence import NO_DRAFT_REASON, Sequence, SequenceStatus
from outrider.shared.base.errors import ErrorCode, OutriderError, UnavailableError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.base.resources import ResourceStats
from outrider.shared.engine.loop import Steppable
from outrider.shared.spec.drafter import Drafter, DrafterState

DRAIN_RETRY_AFTER_S = 5.0
LOOK_S = 1.0
"""Interval in seconds at which an idle engine checks for a new draft, which needs other CUDA graphs."""


class TargetEngine(Steppable):
    """The engine of a target: one model, its KV pool and all live requests.

    Any thread may call `submit`, `cancel`, `pause`, `resume` and `stats`.

    Args:
        runner: Runs the forward passes.
        scheduler: Owns the KV pages and decides which sequences run.
        drafter: Proposes trees.
        limits: Checks requests on arrival.
        metrics: Prometheus metrics. By default, the engine creates them.
        controller: Chooses how much to draft. By default, the engine creates a new controller.
        wake: Wakes the engine thread.
        plan: Configures the decode loop.
        recorder: Decides when CUDA graphs are recorded. By default, the engine creates a new recorder.

    Attributes:
        draining: True from the start of a shutdown. The engine then refuses new requests.
        recorder: Decides when CUDA graphs are recorded.
        recordings: Lists the CUDA graphs that can be recorded in advance.
        step_runner: Owns the slots, and enqueues rounds.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        drafter: Drafter,
        limits: EngineLimits,
        *,
        metrics: TargetMetrics | None = None,
        controller: SpeculationController | None = None,
        wake: Callable[[], None] = lambda: None,
        plan: LoopPlan | None = None,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self.limits = limits
        self.metrics = metrics or TargetMetrics()
        self.controller = controller or SpeculationController()
        self.draining = False
        self.wake = wake
        self._runner = runner
        self._scheduler = scheduler
        self._drafter = drafter
        self._drafts = drafter.state() is not DrafterState.NONE
        self._sessions = DraftSessions(drafter, runner, scheduler)
        self.recorder = recorder or GraphRecorder(runner.graphs)
        self._output = OutputProcessor(scheduler, self._sessions, self.metrics, self.controller)
        self._inbox: deque[Submit | Cancel | Pause | FlushPrefixes] = deque()
        self._session_ids = itertools.count(1)
        self._live: dict[int, Sequence] = {}
        self._expiry = Expiry()
        plan = plan or LoopPlan()
        self._budget = PrefillBudget(plan.prefill_budget_s)
        self.step_runner = plan.make_step_runner(runner, scheduler.limits.max_running, limits.max_model_len)
        self._planner = DraftPlanner(self._sessions, self.controller, self.metrics, self.step_runner.max_rows)
        self._source = make_draft_source(
            drafter,
            self._sessions,
            self._planner,
            scheduler,
            self.controller,
            runner,
            self.step_runner,
            on_device=plan.drafts_on_device,
        )
        self._output.before_end = self._source.ended
        self._loop = self._make_loop(plan)
        self.recordings = Recordings(
            runner, self.step_runner, self._source, drafting=self._drafts, refresh=self._refresh
        )

    # ---- any thread

    def submit(self, request: EngineRequest, sink: EventSink) -> int:
        """Queue a request. The engine delivers the request's events to `sink`.

        Returns:
            A handle for `cancel`, `pause` and `resume`.

        Raises:
            InvalidRequestError: The request does not fit this model. The error names the field.
            OverloadedError: The queue is full.
            UnavailableError: The service is draining.
        """
        if self.draining:
            raise UnavailableError(
                "This server is shutting down; send the request to another server.",
                retry_after_s=DRAIN_RETRY_AFTER_S,
            )
        sequence = Sequence(
            request,
            sink,
            session_id=next(self._session_ids),
            page_size=self._scheduler.page_size,
            eos_token_ids=self.limits.eos_token_ids,
            follow=self._drafts,
            share_features=self._drafts and self._scheduler.prefixes.enabled,
        )
        self.limits.check(sequence, self._scheduler.capacity)
        resumed = bool(request.resume_ids)
        self._scheduler.gate.enter(sequence.prompt_len, request.tenant, resumed=resumed)
        self._inbox.append(Submit(sequence))
        self.wake()
        return sequence.session_id

    def cancel(self, handle: int, keep_tokens: int | None = None) -> None:
        """End a request. Handles of unknown requests are ignored.

        Args:
            handle: The handle that `submit` returned for the request.
            keep_tokens: Number of tokens to bill if a stop string ended the text. None if the client cancels.
        """
        self._inbox.append(Cancel(handle, keep_tokens))
        self.wake()

    def pause(self, handle: int) -> None:
        """Pause a request with a slow reader. The request keeps its KV pages until others need them."""
        self._inbox.append(Pause(handle, True))

    def resume(self, handle: int) -> None:
        """Continue a paused request."""
        self._inbox.append(Pause(handle, False))
        self.wake()

    def flush_prefixes(self) -> Future[int]:
        """Empty the prefix cache. The future receives the number of removed pages. Running requests go on."""
        removed: Future[int] = Future()
        self._inbox.append(FlushPrefixes(removed))
        self.wake()
        return removed

    def prometheus_text(self) -> str:
        """Return the current metrics in Prometheus text format."""
        return self.metrics.render(
            self._scheduler,
            self._drafter.state(),
            self._sessions.num_resyncs,
            self.controller,
            self.recorder.num_first + self.recorder.num_further,
        )

    def stats(self) -> EngineStats:
        """Return a snapshot of load and speculation. The values are approximate while the engine runs."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.active),
            waiting=scheduler.gate.requests,
            waiting_prompt_tokens=scheduler.gate.prompt_tokens,
            pages_total=scheduler.allocator.num_pages,
            pages_free=scheduler.allocator.available_pages,
            pages_held=scheduler.allocator.num_pages - scheduler.allocator.available_pages,
            draft_state=self._drafter.state(),
            generated_tokens=self._output.generated_tokens,
            rounds=self._loop.num_rounds,
            speculation=self._output.totals,
            speedup_estimate=self.controller.speedup_estimate,
            verdict=self.controller.verdict,
            looks_lost_s=self.controller.lost_s,
            prefixes=scheduler.prefixes.stats(),
        )

    def resources(self) -> ResourceStats:
        """Return the memory and the CUDA graphs in use, and the transport of the drafts."""
        return measure_resources(self._runner, self.recorder, self._drafter, self.metrics.drafted_on_device)

    @property
    def num_live(self) -> int:
        """Number of queued and running requests, including those in the inbox."""
        return len(self._live) + sum(isinstance(message, Submit) for message in tuple(self._inbox))

    def ask_recorded(self, *, for_all: bool = False) -> threading.Event:
        """Return an event that is set once the first (or all) graphs are recorded. Thread-safe."""
        asked = self.recorder.ask(for_all=for_all)
        self.wake()
        return asked

    def forget_warm_up(self) -> None:
        """Reset all counters, but keep the costs that the controller has learned.

        Call only while no request is live.
        """
        self.controller.forget_acceptance()
        self.metrics.reset()
        self._output.start_counting()
        self._scheduler.prefixes.start_counting()
        self._loop.num_rounds = 0

    # ---- engine thread

    @property
    def on_device(self) -> bool:
        """True if a round is in flight while the host does other work."""
        return self._loop.active

    def has_work(self) -> bool:
        """Return True if `step` has work, including graphs to record while no request is live."""
        if self._inbox or self._output.pending or self._loop.active or self._scheduler.has_work():
            return True
        return not self._live and (
            self.recorder.is_due() or (self.recorder.planned and self._sessions.outdated)
        )

    def next_wakeup(self) -> float | None:
        """Return the time at which the engine must wake up: for a deadline, a recording, or a new draft."""
        if self._live:
            return self._expiry.next_due
        due = [self._expiry.next_due, self.recorder.next_due]
        if self.recorder.planned and self._drafter.state() is not DrafterState.NONE:
            # Poll even while a draft is connected, because another draft may replace it.
            due.append(time.monotonic() + LOOK_S)
        return min((one for one in due if one is not None), default=None)

    def step(self) -> None:
        """Run one step for every request that can advance."""
        now = time.monotonic()
        self._receive(now)
        self._adopt_draft()
        if not self._record_when_idle():
            self._loop.launch(self._schedule(now))
            self._loop.finish()
        self._output.flush()
        self._source.receive_trees()  # last, because it may wait for a draft in another process

    def _adopt_draft(self) -> None:
        """Adopt the draft if it has changed since the last step."""
        self.recorder.hear()
        if self._sessions.outdated:
            # Sequences may be prefilled again, to capture the features that the new draft needs.
            self._loop.drain()
            if self._refresh():
                self.recorder.renew()

    def _record_when_idle(self) -> bool:
        """Record a graph if one is due and no request is live. Return True if the recorder was called."""
        if self._live:
            self.recorder.live()
        if self._live or self._output.pending or not self.recorder.is_due():
            return False
        self.recorder.record_next()
        return True

    def _schedule(self, now: float) -> StepPlan:
        """Plan the step, and open and close the drafter's sessions accordingly."""
        plan = self._scheduler.schedule(now, self._prefill.limit(self._scheduler))
        for sequence in plan.retracted:
            self._source.ended(sequence)
        for sequence in self._sessions.follow(plan):
            self._source.ended(sequence)
        return plan

    def _refresh(self) -> bool:
        """Adopt the drafter's feature spec. Return True if it has changed."""
        changed = self._sessions.refresh()
        if self._sessions.identity:
            self.controller.adopt(self._sessions.identity)
        if changed:
            self.step_runner.resize_features()
            for sequence in self._scheduler:
                self._source.ended(sequence)
        return changed

    def step_failed(self, error: Exception) -> None:
        """Fail the requests of the batch after an exception in a step. Requests in the queue stay there.

        The requests fail with the code INTERNAL. After the loss of a rank (`UnavailableError`), they fail
        with the code and reason of this error, so that clients retry.
        """
        code, reason = (
            (error.code, error.reason) if isinstance(error, UnavailableError) else (ErrorCode.INTERNAL, None)
        )
        for sequence in list(self._scheduler.active):
            self._scheduler.disown(sequence)
            self._fail(
                sequence,
                OutriderError(f"The engine failed on this request: {error}", code=code, reason=reason),
            )
        self._scheduler.prefixes.flush()
        self._loop.abandon()

    def _make_loop(self, plan: LoopPlan) -> DecodeLoop:
        committer = Committer(self._output, self._poisoned, self._forget)
        self._prefill = Prefill(self._runner, self.step_runner.table, self._source, committer, self._budget)
        return DecodeLoop(
            self.step_runner,
            self._prefill,
            self._planner,
            self._source,
            committer,
            self._scheduler,
            self.controller,
            self.metrics,
            plan.lookahead,
        )

    def _receive(self, now: float) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case Submit(sequence):
                    self._accept(sequence)
                case FlushPrefixes(removed):
                    removed.set_result(self._scheduler.prefixes.flush())
                case Cancel(session_id, keep_tokens):
                    self._cancel(session_id, keep_tokens)
                case Pause(session_id, paused):
                    self._pause(session_id, now if paused else None)
        for sequence, error in self._expiry.overdue(self._live.values(), now, self.limits.pause_timeout_s):
            self._fail(sequence, error)

    def _cancel(self, session_id: int, keep_tokens: int | None) -> None:
        sequence = self._live.get(session_id)
        if sequence is not None:
            self._output.cancel(sequence, keep_tokens)
            self._forget(sequence)

    def _pause(self, session_id: int, since: float | None) -> None:
        """Pause a sequence since a time, or let it continue if the time is None."""
        sequence = self._live.get(session_id)
        if sequence is not None:
            sequence.paused_at = since
            self._expiry.due_at(None if since is None else since + self.limits.pause_timeout_s)

    def _accept(self, sequence: Sequence) -> None:
        self._live[sequence.session_id] = sequence
        self._scheduler.add(sequence)
        if not self._drafts and sequence.speculates:
            sequence.stats.fell_back(NO_DRAFT_REASON)
        if sequence.wants_drafts and sequence.request.speculation.mode is SpeculationMode.AUTO:
            kind = SamplingKind.of(sequence.request.sampling)
            sequence.controller_state = self.controller.new_state(kind)
        self._expiry.due_at(sequence.request.deadline)

    def _poisoned(self, sequence: Sequence) -> None:
        self._scheduler.disown(sequence)
        self._runner.scrub(sequence)
        self._fail(sequence, no_token_error(sequence))

    def _fail(self, sequence: Sequence, error: OutriderError) -> None:
        self._output.fail(sequence, error)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.ENDED
        self._live.pop(sequence.session_id, None)
        if not self._live:
            self._expiry.clear()
