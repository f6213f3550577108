"""Collects the data about a request's generation that the request's log line and span contain."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from outrider.services.gateway.request import (
    FINISH_NAMES,
    ChoiceEvent,
    Chunk,
    Finished,
    Started,
    merge_speculation,
)
from outrider.shared.base.errors import OutriderError
from outrider.shared.base.generation import SpeculationReport
from outrider.shared.obs.tracing import (
    COMPLETION_TOKENS,
    OPERATION,
    OWN,
    PROMPT_TOKENS,
    REASONS,
    AttributeValue,
    Span,
)

current_note: ContextVar[RequestNote | None] = ContextVar("request_note", default=None)
"""The note of the HTTP request that this task serves."""


@dataclass(slots=True)
class RequestNote:
    """Notes on one request and all of its sequences, for the log and for tracing.

    Attributes:
        began: Start of the request, from `time.perf_counter`.
        prompt_tokens: Number of prompt tokens of all sequences.
        completion_tokens: Number of tokens that all sequences have emitted so far.
        ttft_s: Seconds from the start of the request to its first tokens. None before the first tokens.
        error: The error that ended the request, or None.
        key: Name of the API key. None if the gateway has no keys.
        model: Name of the model, as its target reports it. Empty until the request has passed the checks
            before its generation.
        span: The tracing span of the request.
    """

    began: float = field(default_factory=time.perf_counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None
    error: OutriderError | None = None
    key: str | None = None
    model: str = ""
    span: Span = field(default_factory=Span)
    _started: bool = False
    _finishes: list[str] = field(default_factory=list)
    _reports: list[SpeculationReport] = field(default_factory=list)

    def observe(self, one: ChoiceEvent) -> None:
        """Note an event of the generation."""
        match one.event:
            case Chunk(token_ids=token_ids):
                self.completion_tokens += len(token_ids)
                if self.ttft_s is None and token_ids:
                    self.ttft_s = time.perf_counter() - self.began
            case Started(prompt_tokens=prompt_tokens):
                self._started = True
                self.prompt_tokens += prompt_tokens
            case Finished() as end:
                self._reports.append(end.speculation)
                finish = FINISH_NAMES[end.reason]
                if finish not in self._finishes:
                    self._finishes.append(finish)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line. Leave out fields whose values are unknown."""
        fields: dict[str, Any] = {} if self.key is None else {"key": self.key}
        if self._started:
            fields |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        if self.ttft_s is not None:
            fields["ttft_ms"] = round(self.ttft_s * 1e3, 1)
        if self._reports and (accept_length := merge_speculation(self._reports).accept_length):
            fields["accept_length"] = round(accept_length, 2)
        if self._finishes:
            fields["finish"] = ",".join(self._finishes)
        if self.error is not None:
            fields["error"] = self.error.reason or self.error.code.name.lower()
            if self.error.field:
                fields["field"] = self.error.field
        return fields

    def end_span(self, name: str, **attributes: AttributeValue) -> None:
        """End the tracing span of the request.

        Args:
            name: Name of the span, such as ``POST /v1/chat/completions``.
            attributes: Additional attributes of the span. In their names, write ``__`` for each ``.``.
        """
        values: dict[str, AttributeValue] = {
            key.replace("__", "."): value for key, value in attributes.items()
        }
        if self._started:
            values |= {
                OPERATION: "generate",
                PROMPT_TOKENS: self.prompt_tokens,
                COMPLETION_TOKENS: self.completion_tokens,
                REASONS: tuple(self._finishes),
            }
        if self.ttft_s is not None:
            values[f"{OWN}time_to_first_token_s"] = self.ttft_s
        failure = "" if self.error is None else self.error.reason or self.error.code.name.lower()
        self.span.end(values, failure, name)
