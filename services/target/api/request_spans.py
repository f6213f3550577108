"""Traces requests: begins a span when a request arrives, and ends the span with the request's last event.

The engine thread records no spans. Instead, the last event of a request contains the seconds that the request
spent in the queue, in prefill and in decoding.
"""

from __future__ import annotations

import time
from dataclasses import replace

from outrider.services.target.request import EngineRequest, Event, FailedEvent, FinishedEvent
from outrider.shared.obs.tracing import (
    COMPLETION_TOKENS,
    MODEL,
    OPERATION,
    OWN,
    PROMPT_TOKENS,
    REASONS,
    AttributeValue,
    Span,
    Tracer,
    checked_traceparent,
)

NS = 1e9


class RequestSpans:
    """The spans of the live requests of one stream.

    Args:
        tracer: Records the spans.
        model: Name of the model.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._spans: dict[str, Span] = {}

    def begin(self, request: EngineRequest, traceparent: str) -> EngineRequest:
        """Begin the tracing span of a request.

        Args:
            request: The request.
            traceparent: W3C trace context of the caller's span. Empty if the caller sent none.

        Returns:
            The request with a new ``traceparent``, which names the new span. The target sends this value to
            the draft. Without tracing, the ``traceparent`` is unchanged.
        """
        given = checked_traceparent(traceparent)
        if self._tracer.active:
            span = self._spans[request.request_id] = self._tracer.begin("target.generate", given)
            given = span.traceparent
        return replace(request, traceparent=given) if given else request

    def end(self, event: Event) -> None:
        """End the span of a request if the event is the request's last one. Ignore any other event."""
        if not self._spans or not isinstance(event, FinishedEvent | FailedEvent):
            return
        span = self._spans.pop(event.request_id, None)
        if span is None:
            return
        if isinstance(event, FailedEvent):
            span.end({MODEL: self._model}, event.error.reason or event.error.code.name.lower())
            return
        at = time.time_ns()
        for name, seconds in (
            ("decode", event.decode_s),
            ("prefill", event.prefill_s),
            ("queue", event.queue_s),
        ):
            span.stage(name, at - int(seconds * NS), at)
            at -= int(seconds * NS)
        span.end(_attributes(event) | {MODEL: self._model})

    def drop_all(self) -> None:
        """End the spans of requests whose client has left."""
        for span in self._spans.values():
            span.end({MODEL: self._model}, "cancelled")
        self._spans.clear()


def _attributes(event: FinishedEvent) -> dict[str, AttributeValue]:
    report = event.speculation
    return {
        OPERATION: "generate",
        REASONS: (event.reason.value,),
        PROMPT_TOKENS: event.prompt_tokens,
        COMPLETION_TOKENS: event.completion_tokens,
        f"{OWN}cached_tokens": event.cached_tokens,
        f"{OWN}rounds": report.rounds,
        f"{OWN}draft_tokens": report.draft_tokens,
        f"{OWN}accepted_tokens": report.accepted_tokens,
        f"{OWN}accept_length": report.accept_length,
        f"{OWN}accepted_histogram": tuple(report.accepted_histogram),
        f"{OWN}fallback_reason": report.fallback_reason or "",
    }
