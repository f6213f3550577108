"""The target's engine: receive, schedule, announce, deliver, prefill, propose, verify, commit.

The draft works on a round from `announce` on, while the events of the round before are delivered and prompts are prefilled. A round
without draft nodes is a step of plain decoding through the same code. All state belongs to the engine thread; other threads only append
to the inbox.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.drafting.proposals import Proposals
from outrider.services.target.engine.device_loop import DeviceLoop, OverlapPlan
from outrider.services.target.engine.engine_parts import EngineParts
from outrider.services.target.engine.host_rounds import HostRounds
from outrider.services.target.engine.inbox import Cancel, Pause, Submit
from outrider.services.target.engine.output_processor import OutputProcessor
from outrider.services.target.engine.prefill import Prefill
from outrider.services.target.engine.rerecording import Rerecording
from outrider.services.target.engine.rounds import RoundCounter
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.model.input_batch import SamplingMode
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.round_runner import RoundRunner
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.policy.speculation_stats import SpeculationStats
from outrider.services.target.request import EventSink, GenerationRequest
from outrider.services.target.scheduling.limits import EngineLimits
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.services.target.step_times import StepTimes
from outrider.shared.base.errors import (
    DeadlineExceededError,
    ErrorCode,
    OutriderError,
    UnavailableError,
)
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.spec.drafter import Drafter, DrafterState
from outrider.shared.spec.resident import DeviceDrafter
from outrider.shared.spec.tree import DraftShape

DRAIN_RETRY_AFTER_S = 5.0
NO_DRAFT_REASON = "no_draft"
USUAL_MODES = (SamplingMode.NOISE, SamplingMode.GREEDY)
"""What passes are recorded for before anybody is served."""
LOOK_S = 1.0
"""How often an engine that has nothing to do looks whether a draft has come that it would record for."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for GetStats; read from other threads."""

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_held: int
    draft_state: DrafterState
    generated_tokens: int
    rounds: int
    speculation: SpeculationStats
    speedup_estimate: float | None


class TargetEngine:
    """One model, its pool, and every live request. `submit`, `cancel`, `pause`, `resume` and `stats` may be called from any thread.

    Args:
        runner, scheduler, drafter, limits, metrics, controller: Its parts.
        wake: Makes the engine's thread look for work.
        overlap: How rounds are kept on the device; None takes every round by way of the host.
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
        overlap: OverlapPlan | None = None,
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
        self._follower = DraftSessions(drafter, runner, scheduler)
        self.again = Rerecording(runner.graphs)
        """What is recorded anew when the draft becomes another."""
        self._delivery = OutputProcessor(scheduler, self._follower, self.metrics, self.controller)
        self._proposals = Proposals(drafter, self._follower, self.controller, self.metrics)
        self._inbox: deque[Submit | Cancel | Pause] = deque()
        self._session_ids = itertools.count(1)
        self._live: dict[int, Sequence] = {}
        self._next_check: float | None = None
        self._counter = RoundCounter()
        self._parts = EngineParts(
            drafter=drafter,
            follower=self._follower,
            scheduler=scheduler,
            delivery=self._delivery,
            proposals=self._proposals,
            controller=self.controller,
            metrics=self.metrics,
            poisoned=self._poisoned,
            forget=self._forget,
            counter=self._counter,
        )
        self._host = HostRounds(runner, self._parts)
        self._loop = None if overlap is None else self._make_loop(overlap)
        self._prompts = Prefill(
            runner, self._parts, self._host, lambda: self._loop is not None and self._loop.drafts
        )

    # ---- any thread

    def submit(self, request: GenerationRequest, sink: EventSink) -> int:
        """Queue a request; its events go to `sink`.

        Returns:
            A handle for `cancel`, `pause` and `resume`.

        Raises:
            InvalidRequestError: It does not fit this model; names the field.
            OverloadedError: The queue is full.
            UnavailableError: The service is draining.
        """
        if self.draining:
            raise UnavailableError(
                "This server is shutting down; send the request to another one.",
                retry_after_s=DRAIN_RETRY_AFTER_S,
            )
        sequence = Sequence(
            request,
            sink,
            session_id=next(self._session_ids),
            page_size=self._scheduler.page_size,
            eos_token_ids=self.limits.eos_token_ids,
            follow=self._drafts,
        )
        self.limits.check(sequence, self._scheduler.capacity)
        self._scheduler.gate.enter(sequence.prompt_len)
        self._inbox.append(Submit(sequence))
        self.wake()
        return sequence.session_id

    def cancel(self, handle: int, keep_tokens: int | None = None) -> None:
        """End a request; tokens after `keep_tokens` are not billed (a stop string ended the text there). Unknown handles are ignored."""
        self._inbox.append(Cancel(handle, keep_tokens))
        self.wake()

    def pause(self, handle: int) -> None:
        """Skip a request whose reader is slow; its K/V is kept unless others need the pages."""
        self._inbox.append(Pause(handle, True))

    def resume(self, handle: int) -> None:
        """Go on with a paused request."""
        self._inbox.append(Pause(handle, False))
        self.wake()

    def prometheus_text(self) -> str:
        """Return the metrics as of now."""
        return self.metrics.render(
            self._scheduler,
            self._drafter.state(),
            self._follower.num_resyncs,
            self.controller.speedup_estimate,
        )

    def stats(self) -> EngineStats:
        """Return a snapshot; cheap and approximate while the engine runs."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.active),
            waiting=scheduler.gate.requests,
            pages_total=scheduler.allocator.num_pages,
            pages_free=scheduler.allocator.free_pages,
            pages_held=scheduler.allocator.num_pages - scheduler.allocator.free_pages,
            draft_state=self._drafter.state(),
            generated_tokens=self._delivery.generated_tokens,
            rounds=self._counter.value,
            speculation=self._delivery.totals,
            speedup_estimate=self.controller.speedup_estimate,
        )

    @property
    def num_live(self) -> int:
        """Requests that are queued or running, those in the inbox included."""
        return len(self._live) + sum(isinstance(message, Submit) for message in tuple(self._inbox))

    def ask_recorded(self) -> threading.Event:
        """Return what is set when nothing is left to record for the draft that is there now. Any thread."""
        asked = self.again.ask()
        self.wake()
        return asked

    def forget_warm_up(self) -> None:
        """Start all counters over; what the controller has learnt of costs stays. Call while no request is live."""
        self.controller.forget_acceptance()
        self.metrics.reset()
        self._delivery.start_counting()
        self._counter.value = 0

    def recordings(self, bs: int, shape: DraftShape) -> list[Callable[[], None]]:
        """Return what records the passes of one size, see `record_graphs`. Call them before the engine's thread runs, or on it."""
        self._follower.refresh()
        runner = self._runner
        if self._loop is None or not self._loop.takes(shape):
            if shape.drafts and not self._drafts:
                return []
            return [
                lambda mode=mode: runner.capture_verify(bs, shape.max_nodes, mode)  # type: ignore[misc]
                for mode in USUAL_MODES
            ]
        loop = self._loop
        # Plain rounds store feature rows for sequences that are drafted at times, and none for others.
        kinds = [runner.captures] if shape.drafts or not runner.captures else [True, False]
        return [
            lambda mode=mode, capture=kind: loop.capture(bs, shape, mode, capture)  # type: ignore[misc]
            for mode in USUAL_MODES
            for kind in kinds
        ]

    def prefill_recording(self, size: int) -> Callable[[], None]:
        """Return what records the pass over prompts of up to `size` tokens; see `recordings`."""
        self._follower.refresh()
        return lambda: self._runner.capture_prefill(size)

    # ---- engine thread

    @property
    def on_device(self) -> bool:
        """Whether rounds are kept on the device now."""
        return self._loop is not None and self._loop.active

    def has_work(self) -> bool:
        """See `Steppable.has_work`."""
        if self._inbox or self._delivery.pending or self.on_device or self._scheduler.has_work():
            return True
        return not self._live and (self.again.waiting or (self.again.planned and self._follower.outdated))

    def next_wakeup(self) -> float | None:
        """See `Steppable.next_wakeup`: the earliest deadline, or the next look for another draft, which may replace one that is on too."""
        if self._live or not self.again.planned or self._drafter.state() is DrafterState.NONE:
            return self._next_check
        return time.monotonic() + LOOK_S

    def step(self) -> None:
        """One step of every request that can advance."""
        started = time.monotonic()
        self._receive(started)
        if (
            self._loop is not None
            and self._loop.active
            and (self._loop.step() or self._leaves_and_enters(self._loop, started))
        ):
            return
        if self._follower.refresh():
            self.again.renew()
        if not self._live and self.again.waiting and not self._delivery.pending:
            self.again.record_next()
            return
        plan = self._scheduler.schedule(started)
        self._follower.follow(plan)
        loop, prefills = None if self._host.announced else self._loop, plan.prefills
        if (
            loop is not None and loop.takes_prefilled
        ):  # a draft elsewhere is asked first, and works while the target prefills
            self._delivery.flush()
            if prefills:
                self._prompts.finish(self._prompts.begin(prefills))
                if self._scheduler.worth_waiting_for(prefills):
                    self._delivery.flush()
                    return
            prefills = []
        if loop is not None and not prefills and loop.enter(self._scheduler.decoding()):
            self._host.drop()
            self._delivery.flush()
            return
        times = StepTimes(started)
        proposal = self._host.announce(plan.decodes)
        times.announced = time.monotonic()
        self._delivery.flush()
        if prefills:
            self._prompts.finish(self._prompts.begin(prefills))
        times.prefilled = time.monotonic()
        if plan.decodes:
            self._host.run(plan.decodes, proposal, times)

    def _leaves_and_enters(self, loop: DeviceLoop, now: float) -> bool:
        """End the rounds on the device; prompts that have come are enqueued behind them first, and take part in those that follow.

        Returns:
            Whether others have begun; else the step goes on.
        """
        if not (loop.undisturbed and self._scheduler.has_other_work()):
            loop.drain()
            return False
        plan = self._scheduler.schedule(now)
        self._follower.follow(plan)
        prompts = self._prompts.begin(plan.prefills) if plan.prefills else None
        loop.drain()
        if prompts is not None:
            self._prompts.finish(prompts)
        entered = loop.enter(self._scheduler.decoding())
        if entered:
            self._host.drop()
        self._delivery.flush()
        return entered

    def step_failed(self, error: Exception) -> None:
        """See `Steppable.step_failed`: requests in the batch fail, queued ones go on. A lost rank is no fault of the request: try again."""
        code, reason = (
            (error.code, error.reason) if isinstance(error, UnavailableError) else (ErrorCode.INTERNAL, None)
        )
        for sequence in list(self._scheduler.active):
            self._fail(
                sequence,
                OutriderError(f"The engine failed on this request: {error}", code=code, reason=reason),
            )
        self._host.drop()
        if self._loop is not None:
            self._loop.abandon()

    def _make_loop(self, overlap: OverlapPlan) -> DeviceLoop:
        drafter = self._drafter if isinstance(self._drafter, DeviceDrafter) else None
        self._proposals.most_on_device = overlap.batch_sizes[-1]
        rounds = RoundRunner(self._runner, self._runner.graphs, drafter, overlap.columns, overlap.recorded)
        loop = DeviceLoop(rounds, overlap.batch_sizes, self._parts)
        self._delivery.before_end = loop.retire
        return loop

    def _receive(self, now: float) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Submit):
                self._accept(message.sequence)
                continue
            sequence = self._live.get(message.session_id)
            if sequence is None:
                continue
            if isinstance(message, Cancel):
                self._delivery.cancel(sequence, message.keep_tokens)
                self._forget(sequence)
            else:
                sequence.paused_at = now if message.paused else None
                self._due_at(now + self.limits.pause_timeout_s if message.paused else None)
        if self._next_check is not None and now >= self._next_check:
            self._expire(now)

    def _accept(self, sequence: Sequence) -> None:
        self._live[sequence.session_id] = sequence
        self._scheduler.add(sequence)
        if not self._drafts and sequence.speculates:
            sequence.stats.fell_back(NO_DRAFT_REASON)
        if sequence.wants_drafts and sequence.request.speculation.mode is SpeculationMode.AUTO:
            sequence.controller_row = self.controller.new_row()
        self._due_at(sequence.request.deadline)

    def _expire(self, now: float) -> None:
        self._next_check = None
        for sequence in list(self._live.values()):
            deadline, paused_at = sequence.request.deadline, sequence.paused_at
            if deadline is not None and now >= deadline:
                self._fail(
                    sequence, DeadlineExceededError("The deadline passed before the answer was complete.")
                )
            elif paused_at is not None and now >= paused_at + self.limits.pause_timeout_s:
                message = f"The reader was too slow for {self.limits.pause_timeout_s:.0f} s."
                self._fail(sequence, OutriderError(message, code=ErrorCode.CANCELLED, reason="slow_reader"))
            else:
                self._due_at(deadline)
                self._due_at(None if paused_at is None else paused_at + self.limits.pause_timeout_s)

    def _poisoned(self, sequence: Sequence) -> None:
        self._runner.scrub(sequence)
        message = "The model's output for this request is not a number (NaN or infinity); other requests are not affected."
        self._fail(sequence, OutriderError(message, code=ErrorCode.INTERNAL, reason="numerical_error"))

    def _fail(self, sequence: Sequence, error: OutriderError) -> None:
        self._delivery.fail(sequence, error)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.ENDED
        self._live.pop(sequence.session_id, None)
        if not self._live:
            self._next_check = None

    def _due_at(self, moment: float | None) -> None:
        if moment is not None and (self._next_check is None or moment < self._next_check):
            self._next_check = moment
