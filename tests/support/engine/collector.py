"""Collects the events of an engine's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.services.target.request import Event, FailedEvent, FinishedEvent, TokensEvent
from outrider.shared.base.generation import RoundTrace
from outrider.shared.base.logit_rules import TokenLogprob
from outrider.shared.base.token_states import TokenStates


@dataclass
class Collector:
    """An `EventSink` that stores the events of each request.

    It checks that the first event with tokens and the last event report the same number of cached tokens.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishedEvent] = field(default_factory=dict)
    failed: dict[str, FailedEvent] = field(default_factory=dict)
    rounds: dict[str, list[RoundTrace]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    states: dict[str, list[TokenStates]] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    deliveries: int = 0

    def deliver(self, events: Sequence[Event]) -> None:
        self.deliveries += 1
        for event in events:
            assert event.request_id not in self.finished, "no event may follow the end"
            assert event.request_id not in self.failed, "no event may follow the end"
            if isinstance(event, TokensEvent):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
                if event.token_ids:
                    told = self.cached_tokens.setdefault(event.request_id, event.cached_tokens)
                    assert event.cached_tokens in (0, told), "only the first event with tokens tells it"
                self.rounds.setdefault(event.request_id, []).extend(event.rounds)
                self.logprobs.setdefault(event.request_id, []).extend(event.logprobs)
                self.prompt_logprobs.setdefault(event.request_id, []).extend(event.prompt_logprobs)
                if event.states is not None:
                    self.states.setdefault(event.request_id, []).append(event.states)
            elif isinstance(event, FinishedEvent):
                self.finished[event.request_id] = event
                assert self.cached_tokens.get(event.request_id, event.cached_tokens) == event.cached_tokens
            else:
                self.failed[event.request_id] = event
