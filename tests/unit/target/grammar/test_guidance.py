"""Grammars of llguidance on the embedded model's vocabulary: what they allow, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer

from outrider.services.target.grammar import guidance
from outrider.services.target.grammar.guidance import Vocabulary, compile_grammar
from outrider.services.target.grammar.matcher import Matcher, words_of
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError

FILE = Path(__file__).parents[4] / "models" / "demo" / "target" / "tokenizer.json"
SIZE, ENDS = 4099, (0, 2)
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
KINDS = ConstraintKind


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(FILE, SIZE, ENDS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILE))


def allows(matcher: Matcher, token: int) -> bool:
    mask = np.zeros(words_of(SIZE), dtype=np.int32)
    matcher.fill(mask)
    return bool(mask.view(np.uint32)[token // 32] >> token % 32 & 1)


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        (KINDS.JSON_SCHEMA, SCHEMA, '{"a": 12, "b": [true, null]}'),
        (KINDS.JSON_SCHEMA, '{"type": "object"}', "{}"),
        (KINDS.REGEX, "[a-c]+x?", "abcx"),
        (KINDS.CHOICE, '["yes", "nö \\"quoted\\"\\n"]', 'nö "quoted"\n'),
        (KINDS.GRAMMAR, 'root ::= "yes" | "no" num\nnum ::= [0-9]+', "no12"),
        (KINDS.GRAMMAR, 'start: "yes" | "no" NUM\nNUM: /[0-9]+/', "no12"),
    ],
)
def test_a_text_of_the_form_is_accepted_and_may_end(
    vocabulary: Vocabulary, tokenizer: Tokenizer, kind: ConstraintKind, source: str, text: str
) -> None:
    matcher = compile_grammar(Constraint(kind, source), vocabulary).matcher()
    assert not allows(matcher, ENDS[0])
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    for token in tokens:
        assert allows(matcher, token)
        assert matcher.accept(token)
    assert all(allows(matcher, end) for end in ENDS)
    assert matcher.accept(ENDS[1])
    assert not matcher.accept(ENDS[0])
    assert not allows(matcher, ENDS[0])
    matcher.rollback(1 + len(tokens))
    assert allows(matcher, tokens[0])


def test_a_refused_token_changes_nothing(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = compile_grammar(Constraint(KINDS.REGEX, "[ab]+"), vocabulary).matcher()
    (a, z) = (tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "az")
    assert not matcher.accept(ENDS[0])
    assert not matcher.accept(z)
    assert matcher.accept(a)
    assert allows(matcher, ENDS[0])


def test_text_that_only_one_way_can_go_on_is_forced(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"population": {"type": "integer"}}, "required": ["population"]}
    matcher = compile_grammar(
        Constraint(KINDS.JSON_SCHEMA, json.dumps(schema | {"additionalProperties": False})), vocabulary
    ).matcher()
    assert matcher.accept(tokenizer.encode("{", add_special_tokens=False).ids[0])
    assert matcher.accept(tokenizer.encode('"', add_special_tokens=False).ids[0])
    assert tokenizer.decode(matcher.forced()).startswith("population")


def test_json_is_written_like_python_writes_it(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    grammar = compile_grammar(Constraint(KINDS.JSON_SCHEMA, SCHEMA), vocabulary)
    for text in ('{"a":1}', '{ "a": 1}', '{\n"a": 1}'):
        matcher = grammar.matcher()
        assert not all(matcher.accept(t) for t in tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("kind", "source", "part"),
    [
        (KINDS.JSON_SCHEMA, '{"a', "Unterminated"),
        (KINDS.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (KINDS.JSON_SCHEMA, '{"$ref": "http://other/schema"}', "http://other/schema"),
        (KINDS.JSON_SCHEMA, '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        (KINDS.REGEX, "(a", "unclosed group"),
        (KINDS.REGEX, "(?=a)b", "look-around"),
        (KINDS.GRAMMAR, "root ::= missing", "missing"),
        (KINDS.GRAMMAR, "no grammar", "::="),
        (KINDS.CHOICE, "[]", "list"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    vocabulary: Vocabulary, kind: ConstraintKind, source: str, part: str
) -> None:
    with pytest.raises(InvalidRequestError, match=part) as caught:
        compile_grammar(Constraint(kind, source, field="a_field"), vocabulary)
    assert caught.value.field == "a_field"
    assert caught.value.message.startswith("a_field")
    assert len(caught.value.message) < 600


def test_a_token_that_takes_too_much_work_fails_this_output_only(
    vocabulary: Vocabulary, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Constraint(KINDS.REGEX, "(.{1,400}x){9}")
    matcher = compile_grammar(asked, vocabulary).matcher()
    small = None
    for states in range(60, 2000, 20):
        monkeypatch.setattr(guidance, "LIMITS", llguidance.LLParserLimits(max_lexer_states=states))
        with contextlib.suppress(InvalidRequestError):
            small = compile_grammar(asked, vocabulary).matcher()
            break
    assert small is not None
    tokens = tokenizer.encode("abcdefxghijk" * 20, add_special_tokens=False).ids
    assert all(allows(matcher, token) and matcher.accept(token) for token in tokens)
    assert not all(allows(small, token) and small.accept(token) for token in tokens)
    assert not any(allows(small, token) for token in range(SIZE))
    small.rollback(1)
    assert small.forced() == []


def test_special_tokens_are_found_by_their_text(vocabulary: Vocabulary) -> None:
    grammar = compile_grammar(Constraint(KINDS.REGEX, "a"), vocabulary)
    assert grammar.token_of("<|im_end|>") == 2
    assert grammar.token_of("<nothing>") is None
    assert grammar.text_of(2) == b"<|im_end|>"
    assert (grammar.ends(), grammar.vocab_size) == (ENDS, SIZE)
