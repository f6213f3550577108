"""Grammars of llguidance on the embedded model's vocabulary: what they allow, and what is refused."""

from __future__ import annotations

import contextlib
import json

import llguidance
import pytest
from support.grammars.grammar_rig import SIZE, allows, check_refusal
from tokenizers import Tokenizer

from outrider.services.target.grammar import guidance
from outrider.services.target.grammar.guidance import compile_guidance
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
KINDS = ConstraintKind


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
    constraint = Constraint(kind, source, field="a_field")
    check_refusal(lambda one: compile_guidance(one, vocabulary), constraint, part)


@pytest.mark.parametrize("field", ["tool_choice", "ebnf"])
def test_an_unknown_keyword_is_named_without_the_grammar(vocabulary: Vocabulary, field: str) -> None:
    source = 'start: "{" object\nobject: %json {"type": "array", "uniqueItems": true}'
    with pytest.raises(InvalidRequestError, match="keywords that are not supported: 'uniqueItems'") as caught:
        compile_guidance(Constraint(KINDS.GRAMMAR, source, field=field), vocabulary)
    assert (caught.value.field, "%json" in caught.value.message) == (field, False)


def test_a_token_that_takes_too_much_work_fails_this_output_only(
    vocabulary: Vocabulary, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Constraint(KINDS.REGEX, "(.{1,400}x){9}")
    matcher = compile_guidance(asked, vocabulary).matcher()
    small = None
    for states in range(60, 2000, 20):
        monkeypatch.setattr(guidance, "LIMITS", llguidance.LLParserLimits(max_lexer_states=states))
        with contextlib.suppress(InvalidRequestError):
            small = compile_guidance(asked, vocabulary).matcher()
            break
    assert small is not None
    tokens = tokenizer.encode("abcdefxghijk" * 20, add_special_tokens=False).ids
    assert all(allows(matcher, token) and matcher.accept(token) for token in tokens)
    assert not all(allows(small, token) and small.accept(token) for token in tokens)
    assert not any(allows(small, token) for token in range(SIZE))
    small.rollback(1)
    assert small.forced() == []
