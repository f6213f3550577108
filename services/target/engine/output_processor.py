"""Emits token, finish and error events in one delivery per step; ends sequences and frees their KV pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.model.outcome import Outcome
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.policy.speculation_stats import SpeculationStats
from outrider.services.target.request import Event, EventSink, FailedEvent, FinishedEvent, TokensEvent
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.scheduling.sequence import Advance, Sequence
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.generation import FinishReason, RoundTrace
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates


class OutputProcessor:
    """Collects the events of an engine step and delivers them together. Ends sequences and frees their pages.

    Attributes:
        generated_tokens: Number of tokens emitted since the last call of `start_counting`, or since the
            start.
        totals: Summed speculation statistics of the sequences that have ended since the last call of
            `start_counting`, or since the start.
        before_end: Called with every sequence before it ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        draft_sessions: DraftSessions,
        metrics: TargetMetrics,
        controller: SpeculationController,
    ) -> None:
        self._scheduler = scheduler
        self._draft_sessions = draft_sessions
        self._metrics = metrics
        self._controller = controller
        self._events: dict[int, tuple[EventSink, list[Event]]] = {}
        self.generated_tokens = 0
        self.totals = SpeculationStats()
        self.before_end: Callable[[Sequence], None] = lambda sequence: None

    def start_counting(self) -> None:
        """Reset the totals."""
        self.generated_tokens = 0
        self.totals = SpeculationStats()

    @property
    def pending(self) -> bool:
        """True if events wait for `flush`."""
        return bool(self._events)

    def flush(self) -> None:
        """Deliver the collected events to their sinks, in order."""
        if self._events:
            batches, self._events = self._events, {}
            for sink, events in batches.values():
                sink.deliver(events)

    def tokens(
        self,
        sequence: Sequence,
        step: Advance,
        trace: RoundTrace | None,
        logprobs: Seq[TokenLogprob] = (),
        states: TokenStates | None = None,
        outcome: Outcome | None = None,
    ) -> bool:
        """Emit the tokens that a prefill or round kept. Return True if these tokens ended the sequence.

        `outcome` is the outcome of the round. None for a prefill.
        """
        now = time.monotonic()
        cached_tokens = 0
        if not sequence.first_token_at:
            cached_tokens = sequence.cached_prompt
            sequence.first_token_at = now
            self._metrics.first_token(sequence, now)
        else:
            self._metrics.more_tokens(len(step.kept), now - sequence.last_emit_at)
        sequence.last_emit_at = now
        self.generated_tokens += len(step.kept)
        rounds = () if trace is None else (trace,)
        request_id = sequence.request.request_id
        event = TokensEvent(
            request_id,
            step.kept,
            rounds,
            logprobs,
            states=states,
            cached_tokens=cached_tokens,
            draft_tokens=None if outcome is None else outcome.num_nodes - 1,
            accepted_tokens=0 if outcome is None else len(outcome.accepted),
        )
        sequence.unsent.append(event)
        if step.finish is None:
            if states is not None or now >= sequence.send_at:
                self._send_tokens(sequence)
                sequence.send_at = now + sequence.request.message_interval_s
            return False
        self._finish(
            sequence, step.finish, step.matched_token, sequence.committed_len - sequence.prompt_len, now
        )
        return True

    def prompt_logprobs(self, sequence: Sequence, logprobs: Seq[TokenLogprob]) -> None:
        """Emit the logprobs of the next prompt tokens."""
        self._put(sequence, TokensEvent(sequence.request.request_id, (), prompt_logprobs=logprobs))

    def states(self, sequence: Sequence, states: TokenStates) -> None:
        """Emit the states of the next prompt tokens."""
        self._put(sequence, TokensEvent(sequence.request.request_id, (), states=states))

    def cancel(self, sequence: Sequence, keep_tokens: int | None) -> None:
        """End a sequence at the client's request, without billing for tokens after `keep_tokens`."""
        emitted = sequence.committed_len - sequence.prompt_len
        kept = emitted if keep_tokens is None else min(keep_tokens, emitted)
        sequence.stats.tokens_cut += emitted - kept
        reason = FinishReason.CANCELLED if keep_tokens is None else FinishReason.STOP
        self._finish(sequence, reason, None, kept, time.monotonic())

    def fail(self, sequence: Sequence, error: OutriderError) -> None:
        """End a sequence with an error."""
        self._end(sequence, time.monotonic())
        self._metrics.finished("error")
        self._put(sequence, FailedEvent(sequence.request.request_id, error))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        matched: int | None,
        completion_tokens: int,
        now: float,
    ) -> None:
        self._end(sequence, now)
        self._metrics.finished(reason.value, now - sequence.submitted_at)
        admitted = sequence.admitted_at or now
        first = sequence.first_token_at or now
        event = FinishedEvent(
            request_id=sequence.request.request_id,
            reason=reason,
            matched_token=matched,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=completion_tokens,
            speculation=sequence.stats.report(
                self._controller.speedup_estimate if sequence.stats.draft_rounds else None, sequence.plain_by
            ),
            queue_s=admitted - sequence.submitted_at,
            prefill_s=first - admitted,
            decode_s=now - first,
            cached_tokens=sequence.cached_prompt,
        )
        self._put(sequence, event)

    def _end(self, sequence: Sequence, now: float) -> None:
        self.before_end(sequence)
        self._draft_sessions.unfollow(sequence)
        self._scheduler.release(sequence, now)
        self.totals.merge(sequence.stats)

    def _send_tokens(self, sequence: Sequence) -> None:
        if sequence.unsent:
            events, sequence.unsent = sequence.unsent, []
            self._deliver(sequence, TokensEvent.joined(events))

    def _put(self, sequence: Sequence, event: Event) -> None:
        self._send_tokens(sequence)
        self._deliver(sequence, event)

    def _deliver(self, sequence: Sequence, event: Event) -> None:
        sink = sequence.sink
        batch = self._events.get(id(sink))
        if batch is None:
            self._events[id(sink)] = (sink, [event])
        else:
            batch[1].append(event)
