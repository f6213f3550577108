"""Traces of requests through the services: names, W3C trace contexts, and a tracer that records nothing.

A trace of a request has a span of each service: the gateway's, below it one of the target for each sequence,
and below that one of a draft that has its own process. W3C's ``traceparent`` joins them. Services without an
endpoint for traces use the tracer here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TRACEPARENT = "traceparent"
"""Name of the HTTP header and of the gRPC metadata."""

# Names of OpenTelemetry's conventions for generative models.
MODEL = "gen_ai.response.model"
OPERATION = "gen_ai.operation.name"
REASONS = "gen_ai.response.finish_reasons"
PROMPT_TOKENS = "gen_ai.usage.input_tokens"
COMPLETION_TOKENS = "gen_ai.usage.output_tokens"
ERROR = "error.type"
# Outrider's own names.
OWN = "outrider."

Value = str | int | float | bool | tuple[str, ...] | tuple[int, ...]

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def checked_traceparent(text: object) -> str:
    """Return a ``traceparent`` of a client if it is valid, else an empty text."""
    return text if isinstance(text, str) and _TRACEPARENT.fullmatch(text) else ""


class Span:
    """A span that records nothing.

    Attributes:
        traceparent: What the next service gets: this span, or without tracing what the client sent.
    """

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def stage(self, name: str, start_ns: int, end_ns: int) -> None:
        """Add a child span with these times, in nanoseconds since 1970."""

    def end(
        self, attributes: Mapping[str, Value] | None = None, error: str = "", name: str | None = None
    ) -> None:
        """End the span.

        Args:
            attributes: Values to record.
            error: Why the work failed, or an empty text.
            name: A better name than at the beginning, or None.
        """


class Tracer:
    """A tracer that records nothing."""

    active = False
    """True if spans are recorded."""

    def begin(self, name: str, traceparent: str = "") -> Span:
        """Begin a span below the span that `traceparent` names, or a new trace."""
        return Span(traceparent)

    def close(self) -> None:
        """Send what has not been sent yet. Takes at most a few seconds."""
