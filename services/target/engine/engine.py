"""The target's engine and its `step`: receive, schedule, announce, deliver, prefill, propose, verify, commit.

The draft starts to work on a round at `announce`. Meanwhile the target delivers the events of the previous
round and prefills prompts. A round without draft nodes is plain decoding through the same code.

All state belongs to the engine thread. Other threads only append to the inbox.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.drafting.proposals import Proposals
from outrider.services.target.engine.device_loop import DeviceLoop, OverlapPlan
from outrider.services.target.engine.engine_parts import EngineParts
from outrider.services.target.engine.engine_stats import EngineStats
from outrider.services.target.engine.expiry import Expiry
from outrider.services.target.engine.host_rounds import HostRounds
from outrider.services.target.engine.inbox import Cancel, Pause, Submit
from outrider.services.target.engine.output_processor import OutputProcessor
from outrider.services.target.engine.prefill import Prefill
from outrider.services.target.engine.recordings import device_recordings, host_recordings
from outrider.services.target.engine.rerecording import Rerecording
from outrider.services.target.engine.rounds import RoundCounter
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.round_runner import RoundRunner
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.request import EventSink, GenerationRequest
from outrider.services.target.scheduling.limits import EngineLimits
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.scheduling.sequence import Sequence, SequenceStatus
from outrider.services.target.step_times import StepTimes
from outrider.shared.base.errors import ErrorCode, OutriderError, UnavailableError
from outrider.shared.base.generation import SpeculationMode
from outrider.shared.engine.loop import Steppable
from outrider.shared.spec.drafter import Drafter, DrafterState
from outrider.shared.spec.resident import DeviceDrafter
from outrider.shared.spec.tree import DraftShape

DRAIN_RETRY_AFTER_S = 5.0
NO_DRAFT_REASON = "no_draft"
LOOK_S = 1.0
"""Poll interval at which an idle engine checks for a new draft, which needs other CUDA graphs."""


class TargetEngine(Steppable):
    """One model, its KV pool and all live requests.

    `submit`, `cancel`, `pause`, `resume` and `stats` may be called from any thread.

    Args:
        runner: Runs the forward passes.
        scheduler: Owns the KV pages and decides which sequences run.
        drafter: Proposes trees.
        limits: Checks requests on arrival.
        metrics: Prometheus metrics. By default, the engine creates new metrics.
        controller: Chooses how much to draft. By default, the engine creates a new controller.
        wake: Wakes the engine thread.
        overlap: Configures which rounds stay on the device. None runs every round through the host.

    Attributes:
        draining: True from the start of a shutdown. The engine then refuses new requests.
        rerecording: Records CUDA graphs again after the draft has changed.
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
        self.rerecording = Rerecording(runner.graphs)
        self._delivery = OutputProcessor(scheduler, self._follower, self.metrics, self.controller)
        self._proposals = Proposals(drafter, self._follower, self.controller, self.metrics)
        self._inbox: deque[Submit | Cancel | Pause] = deque()
        self._session_ids = itertools.count(1)
        self._live: dict[int, Sequence] = {}
        self._expiry = Expiry()
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
        )
        self.limits.check(sequence, self._scheduler.capacity)
        self._scheduler.gate.enter(sequence.prompt_len)
        self._inbox.append(Submit(sequence))
        self.wake()
        return sequence.session_id

    def cancel(self, handle: int, keep_tokens: int | None = None) -> None:
        """End a request. Ignore unknown handles.

        Args:
            handle: The handle that `submit` returned.
            keep_tokens: Number of tokens to bill if a stop string ended the text. None if the client cancels.
        """
        self._inbox.append(Cancel(handle, keep_tokens))
        self.wake()

    def pause(self, handle: int) -> None:
        """Pause a request whose reader is slow. It keeps its KV pages unless other requests need them."""
        self._inbox.append(Pause(handle, True))

    def resume(self, handle: int) -> None:
        """Continue a paused request."""
        self._inbox.append(Pause(handle, False))
        self.wake()

    def prometheus_text(self) -> str:
        """Return the current metrics in Prometheus text format."""
        return self.metrics.render(
            self._scheduler,
            self._drafter.state(),
            self._follower.num_resyncs,
            self.controller.speedup_estimate,
        )

    def stats(self) -> EngineStats:
        """Return a snapshot of load and speculation. The values are approximate while the engine runs."""
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
        """Number of queued and running requests, including those in the inbox."""
        return len(self._live) + sum(isinstance(message, Submit) for message in tuple(self._inbox))

    def ask_recorded(self) -> threading.Event:
        """Return an event that is set once all graphs for the current draft are recorded. Thread-safe."""
        asked = self.rerecording.ask()
        self.wake()
        return asked

    def forget_warm_up(self) -> None:
        """Reset all counters, but keep the costs that the controller has learned.

        Call only while no request is live.
        """
        self.controller.forget_acceptance()
        self.metrics.reset()
        self._delivery.start_counting()
        self._counter.value = 0

    def recordings(self, bs: int, shape: DraftShape) -> list[Callable[[], None]]:
        """Return functions that each record one CUDA graph for a batch size and tree shape.

        Call these functions on the engine thread, or before the engine thread runs.
        """
        self._follower.refresh()
        if self._loop is not None and self._loop.takes(shape):
            return device_recordings(self._runner, self._loop, bs, shape)
        if shape.drafts and not self._drafts:
            return []
        return host_recordings(self._runner, bs, shape)

    def prefill_recording(self, size: int) -> Callable[[], None]:
        """Return a function that records the pass over prompts of up to `size` tokens, as in `recordings`."""
        self._follower.refresh()
        return lambda: self._runner.capture_prefill(size)

    # ---- engine thread

    @property
    def on_device(self) -> bool:
        """True if rounds are currently kept on the device."""
        return self._loop is not None and self._loop.active

    def has_work(self) -> bool:
        """Return True if `step` has work, including graphs to record while no request is live."""
        if self._inbox or self._delivery.pending or self.on_device or self._scheduler.has_work():
            return True
        return not self._live and (
            self.rerecording.waiting or (self.rerecording.planned and self._follower.outdated)
        )

    def next_wakeup(self) -> float | None:
        """Return the time at which the engine must wake up, for a request's deadline or to poll the draft."""
        if self._live or not self.rerecording.planned or self._drafter.state() is DrafterState.NONE:
            return self._expiry.next_due
        # Poll even while a draft is connected, because another draft may replace it.
        return time.monotonic() + LOOK_S

    def step(self) -> None:
        """Run one step for every request that can advance."""
        # 1. Receive new requests, cancellations and pauses; end expired requests.
        started = time.monotonic()
        self._receive(started)

        # 2. Continue the rounds on the device, if there are any. In the steady state, the step ends here.
        if (
            self._loop is not None
            and self._loop.active
            and (self._loop.step() or self._leaves_and_enters(self._loop, started))
        ):
            return

        # 3. Adopt a changed draft. Each step records one of the new graphs, and only while no request is
        # live.
        if self._follower.refresh():
            self.rerecording.renew()
        if not self._live and self.rerecording.waiting and not self._delivery.pending:
            self.rerecording.record_next()
            return

        # 4. Schedule.
        plan = self._scheduler.schedule(started)
        self._follower.follow(plan)
        loop, prefills = None if self._host.announced else self._loop, plan.prefills

        # 5. Prefill now if the sequences can join rounds on the device afterwards. Otherwise the draft is in
        # another process. In that case announce first (step 7), so that the draft works while the target
        # prefills.
        if loop is not None and loop.takes_prefilled:
            self._delivery.flush()
            if prefills:
                self._prompts.finish(self._prompts.begin(prefills))
                if self._scheduler.worth_waiting_for(prefills):
                    self._delivery.flush()
                    return
            prefills = []

        # 6. Start rounds on the device, if all decoding sequences can take part.
        if loop is not None and not prefills and loop.enter(self._scheduler.decoding()):
            self._host.drop()
            self._delivery.flush()
            return

        # 7. Otherwise run a round through the host: announce, deliver, prefill, propose, verify, commit.
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
        """End the rounds on the device and start new rounds that include newly arrived prompts.

        The prompts are enqueued behind the running round, so that the device does not idle.

        Returns:
            True if new rounds have started. Otherwise the step continues on the host.
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
        """Fail the requests in the batch after an exception. Queued requests stay in the queue.

        The error of a lost rank, an `UnavailableError`, keeps its code and reason, so that clients retry.
        """
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
                self._expiry.due_at(now + self.limits.pause_timeout_s if message.paused else None)
        for sequence, error in self._expiry.overdue(self._live.values(), now, self.limits.pause_timeout_s):
            self._fail(sequence, error)

    def _accept(self, sequence: Sequence) -> None:
        self._live[sequence.session_id] = sequence
        self._scheduler.add(sequence)
        if not self._drafts and sequence.speculates:
            sequence.stats.fell_back(NO_DRAFT_REASON)
        if sequence.wants_drafts and sequence.request.speculation.mode is SpeculationMode.AUTO:
            sequence.controller_row = self.controller.new_row()
        self._expiry.due_at(sequence.request.deadline)

    def _poisoned(self, sequence: Sequence) -> None:
        self._runner.scrub(sequence)
        message = "The model computed NaN or infinity for this request. Other requests are not affected."
        self._fail(sequence, OutriderError(message, code=ErrorCode.INTERNAL, reason="numerical_error"))

    def _fail(self, sequence: Sequence, error: OutriderError) -> None:
        self._delivery.fail(sequence, error)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.ENDED
        self._live.pop(sequence.session_id, None)
        if not self._live:
            self._expiry.clear()
