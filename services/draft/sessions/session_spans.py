"""The draft's spans: one for each sequence that it follows for a traced request."""

from __future__ import annotations

from outrider.services.draft.sessions.session import PeerId, Session
from outrider.shared.obs.tracing import OWN, AttributeValue, Span, Tracer, checked_traceparent


class SessionSpans:
    """The tracing spans of the draft's open sessions. Engine thread only.

    Requests without a ``traceparent`` have no span, because the target decides which requests are traced.

    Attributes:
        tracer: Records the spans.
    """

    def __init__(self) -> None:
        self.tracer = Tracer()
        self._spans: dict[tuple[PeerId, int], Span] = {}

    def opened(self, peer: PeerId, session_id: int, traceparent: str) -> None:
        """Begin the span of a session. A session that opens again ends its former span."""
        if not self.tracer.active or not (parent := checked_traceparent(traceparent)):
            return
        if (former := self._spans.pop((peer, session_id), None)) is not None:
            former.end(error="reopened")
        self._spans[peer, session_id] = self.tracer.begin("draft.follow", parent)

    def closing(self, peer: PeerId, session_id: int, session: Session | None) -> None:
        """End the span of a session that is about to be closed."""
        if (span := self._spans.pop((peer, session_id), None)) is not None:
            values: dict[str, AttributeValue] = {}
            if session is not None:
                values = {
                    f"{OWN}committed_tokens": session.committed_len,
                    f"{OWN}draft_cache_rows": session.cached_rows,
                    f"{OWN}epoch": session.epoch,
                }
            span.end(values)

    def left(self, peer: PeerId) -> None:
        """End the spans of a target that has left."""
        for key in [key for key in self._spans if key[0] == peer]:
            self._spans.pop(key).end(error="target_left")
