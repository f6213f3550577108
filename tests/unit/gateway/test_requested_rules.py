"""Rules of requests: names and ranges in errors, and the token ids of bad words."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.services.gateway.requested_rules import RequestedRules, check_top
from outrider.shared.base.errors import InvalidRequestError

VOCAB = 100


def encode(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) % VOCAB for letter in text)


def test_absent_fields_change_nothing() -> None:
    rules = RequestedRules(logit_bias={}, min_tokens=0, presence_penalty=0, repetition_penalty=1)
    rules.check()
    assert rules.build(encode, VOCAB).neutral
    assert RequestedRules(logit_bias={"3": 0.0}).build(None, VOCAB).neutral


def test_values_arrive() -> None:
    rules = RequestedRules(0.5, -2, 1.3, {"7": 1, "3": -100}, 4, (5, 6, 5)).build(None, VOCAB)
    assert (rules.presence_penalty, rules.frequency_penalty, rules.repetition_penalty) == (0.5, -2.0, 1.3)
    assert rules.logit_bias == ((3, -100.0), (7, 1.0))
    assert (rules.min_tokens, rules.allowed_token_ids) == (4, (5, 6))


def test_a_bad_word_is_forbidden_with_and_without_a_space_before_it() -> None:
    rules = RequestedRules(bad_words=("ab", " c"), bad_word_ids=((9, 9),)).build(encode, VOCAB)
    assert rules.bad_words == ((9, 9), encode("ab"), encode(" ab"), encode(" c"))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias"),
        ({"logit_bias": {"-1": 1.0}}, "logit_bias"),
        ({"logit_bias": {"1": 101.0}}, "logit_bias"),
        ({"logit_bias": {"01": 1.0, "1": 2.0}}, "logit_bias"),
        ({"logit_bias": {str(token): 1.0 for token in range(1025)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words": (" ",)}, "bad_words"),
        ({"bad_words": ("\ud800",)}, "bad_words"),
        ({"bad_words": ("a",) * 129}, "bad_words"),
        ({"bad_words": ("a" * 300,)}, "bad_words"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestedRules(**fields).check()
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logit_bias": {"100": 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (100,)}, "allowed_token_ids"),
        ({"bad_word_ids": ((1, 100),)}, "bad_words"),
        ({"bad_word_ids": ((),)}, "bad_words"),
        ({"bad_words": ("a" * 65,)}, "bad_words"),
    ],
)
def test_token_ids_are_checked_against_the_vocabulary(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestedRules(**fields).build(encode, VOCAB)
    assert caught.value.field == name


def test_bad_words_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestedRules(bad_words=("a",)).build(None, VOCAB)
    assert caught.value.reason == "no_tokenizer"


def test_the_number_of_alternatives_has_a_limit() -> None:
    assert [check_top(value, "logprobs") for value in (None, 0, 20)] == [None, 0, 20]
    for value in (-1, 21):
        with pytest.raises(InvalidRequestError):
            check_top(value, "logprobs")
