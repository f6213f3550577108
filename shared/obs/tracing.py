"""Traces of requests through the services: names, W3C trace contexts, and a tracer that records nothing.

The trace of a request begins with a span of the gateway. The target adds a child span for each sequence. A
draft in its own process adds a child of the target's span. The services pass on the W3C header
``traceparent``, which joins the spans to one trace. A service that has no endpoint for traces uses the tracer
that records nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

TRACEPARENT = "traceparent"
"""Name of the HTTP header, and of the gRPC metadata key, for the trace context."""

# Names of OpenTelemetry's conventions for generative models.
MODEL = "gen_ai.response.model"
OPERATION = "gen_ai.operation.name"
REASONS = "gen_ai.response.finish_reasons"
PROMPT_TOKENS = "gen_ai.usage.input_tokens"
COMPLETION_TOKENS = "gen_ai.usage.output_tokens"
ERROR = "error.type"
# Outrider's own names.
OWN = "outrider."

AttributeValue = str | int | float | bool | tuple[str, ...] | tuple[int, ...]

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def checked_traceparent(text: object) -> str:
    """Return the client's ``traceparent`` if it is valid. Otherwise, return an empty text."""
    return text if isinstance(text, str) and _TRACEPARENT.fullmatch(text) else ""


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the valid ``traceparent`` in the metadata of a gRPC call, or an empty text."""
    return checked_traceparent(dict(metadata or ()).get(TRACEPARENT))


class Span:
    """A span that records nothing.

    Attributes:
        traceparent: Value of the W3C header ``traceparent`` to send to the next service. With tracing, the
            value names this span. Without tracing, it is the value that this service has received.
    """

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def stage(self, name: str, start_ns: int, end_ns: int) -> None:
        """Add a child span with these times, in nanoseconds since 1970."""

    def end(
        self, attributes: Mapping[str, AttributeValue] | None = None, error: str = "", name: str | None = None
    ) -> None:
        """End the span.

        Args:
            attributes: Values to record.
            error: The reason why the work failed. Empty if the work succeeded.
            name: A new name for the span. With None, the span keeps its name.
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
