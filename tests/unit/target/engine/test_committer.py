"""The error of a request for which no token can be chosen names the fields that are responsible."""

from __future__ import annotations

import pytest
from support.engine.target_harness import Collector
from support.grammars.toy_grammar import ToyGrammar

from outrider.services.target.engine.committer import no_token_error
from outrider.services.target.request import EngineRequest, SpeculationParams
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import ErrorCode
from outrider.shared.base.generation import SamplingParams, SpeculationMode
from outrider.shared.base.logit_rules import NO_RULES, LogitRules
from outrider.shared.spec.tree import DraftShape

FIELD = "response_format"
REGEX = Constraint(ConstraintKind.REGEX, "[a-z]", field=FIELD)


def sequence_with(rules: LogitRules, *, form: bool = False, output: tuple[int, ...] = ()) -> Sequence:
    request = EngineRequest(
        request_id="1",
        prompt_ids=(1, 2, 3),
        max_new_tokens=9,
        sampling=SamplingParams(0.0, rules=rules),
        speculation=SpeculationParams(SpeculationMode.OFF, DraftShape(1, 1, 1)),
        constraint=REGEX if form else None,
        grammar=ToyGrammar(32, (5,), 1) if form else None,
    )
    sequence = Sequence(request, Collector(), session_id=1, page_size=4)
    sequence.tokens += output
    return sequence


WORDS = LogitRules(bad_words=((4,),))
ALL = LogitRules(min_tokens=2, bad_words=((4,),), allowed_token_ids=(5,))


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        (WORDS, "bad_words forbids"),
        (ALL, "min_tokens, bad_words and allowed_token_ids forbid"),
        (LogitRules(min_tokens=2, allowed_token_ids=(5,)), "min_tokens and allowed_token_ids forbid"),
    ],
)
def test_the_options_that_forbid_the_tokens_of_a_form_are_named(rules: LogitRules, names: str) -> None:
    error = no_token_error(sequence_with(rules, form=True))
    assert f"{names} every token that {FIELD} allows here" in error.message
    assert "only one way to divide this text into tokens" in error.message
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, FIELD)


def test_a_form_without_such_options_is_named_alone() -> None:
    error = no_token_error(sequence_with(LogitRules(logit_bias=((4, -100.0),)), form=True))
    assert f"{FIELD} allows no further token here" in error.message
    assert error.field == FIELD


@pytest.mark.parametrize(
    ("rules", "names", "field"),
    [
        (WORDS, "bad_words forbids", "bad_words"),
        (ALL, "min_tokens, bad_words and allowed_token_ids forbid", "allowed_token_ids"),
        (LogitRules(min_tokens=2), "min_tokens forbids", "min_tokens"),
    ],
)
def test_without_a_form_the_options_forbid_every_token(rules: LogitRules, names: str, field: str) -> None:
    error = no_token_error(sequence_with(rules))
    assert f"{names} every token whose logit is finite" in error.message
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, field)


def test_min_tokens_is_not_responsible_once_it_is_reached() -> None:
    assert "min_tokens" not in no_token_error(sequence_with(ALL, output=(5, 5))).message


def test_logits_that_are_no_numbers_are_an_internal_error() -> None:
    assert no_token_error(sequence_with(NO_RULES)).code is ErrorCode.INTERNAL
