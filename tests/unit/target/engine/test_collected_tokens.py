"""Answers that nobody reads before their end: the engine sends their tokens in few messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.engine.target_harness import FakeDrafter, generate_plain, make_harness, random_plan

from outrider.services.target.drafting.no_drafter import NoDrafter
from outrider.services.target.engine.loop_plan import LoopPlan
from outrider.services.target.request import Event, FailedEvent, FinishedEvent, TokensEvent
from outrider.shared.base.logit_rules import LogprobParams
from outrider.shared.nn.decoder import Decoder

VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]


class Messages(list[TokensEvent | FinishedEvent]):
    """An `EventSink` that keeps the events."""

    def deliver(self, events: Sequence[Event]) -> None:
        self.extend(event for event in events if not isinstance(event, FailedEvent))


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("ending", ["length", "cancelled"])
def test_tokens_of_an_answer_that_nobody_reads_yet_are_sent_together(
    decoder: Decoder, lookahead: int, ending: str
) -> None:
    plain = generate_plain(decoder, NoDrafter(), PROMPT, 60)
    harness = make_harness(decoder, FakeDrafter(random_plan(VOCAB)), plan=LoopPlan(lookahead=lookahead))
    messages = Messages()
    wanted = harness.request(PROMPT, 60, trace=True, logprobs=LogprobParams(top=2))
    handle = harness.engine.submit(replace(wanted, message_interval_s=math.inf), messages)
    if ending == "cancelled":
        while harness.engine.stats().generated_tokens < 8:
            harness.step()
        assert len(messages) == 1
        harness.engine.cancel(handle)
    harness.run()
    first, rest, end = messages
    assert isinstance(first, TokensEvent)
    assert isinstance(rest, TokensEvent)
    assert isinstance(end, FinishedEvent)
    tokens = [*first.token_ids, *rest.token_ids]
    assert len(first.token_ids) == 1
    assert tokens == plain[: len(tokens)]
    assert len(tokens) == end.completion_tokens
    assert len(rest.logprobs) == len(rest.token_ids)
    assert [token for one in rest.rounds for token in one.emitted] == rest.token_ids
    assert (rest.draft_tokens, rest.accepted_tokens) == (
        end.speculation.draft_tokens,
        end.speculation.accepted_tokens,
    )
