"""Grammars of xgrammar: what is refused, and the cap on the time per token."""

from __future__ import annotations

import numpy as np
import pytest
from support.grammars.grammar_rig import SIZE, check_refusal

from outrider.services.target.grammar import xgrammar
from outrider.services.target.grammar.matcher import token_mask_words
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.services.target.grammar.xgrammar import compile_xgrammar
from outrider.shared.base.constraint import Constraint, ConstraintKind

KINDS = ConstraintKind


@pytest.mark.parametrize(
    ("kind", "source", "part"),
    [
        (KINDS.JSON_SCHEMA, '{"a', "Unterminated"),
        (KINDS.JSON_SCHEMA, '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "no text"),
        (KINDS.REGEX, "(a", "not closed"),
        (KINDS.REGEX, "a)", "not opened"),
        (KINDS.REGEX, r"\w", "not supported"),
        (KINDS.REGEX, "(?=a)b", "error"),
        (KINDS.GRAMMAR, "root ::= missing", "missing"),
        (KINDS.GRAMMAR, 'start: "a"', "lexer error"),
        (KINDS.CHOICE, "[]", "list"),
        (KINDS.CHOICE, '["\\ud800"]', "surrogate"),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    vocabulary: Vocabulary, kind: ConstraintKind, source: str, part: str
) -> None:
    constraint = Constraint(kind, source, field="a_field")
    check_refusal(lambda one: compile_xgrammar(one, vocabulary), constraint, part)


def test_a_mask_that_takes_too_long_fails_this_output_only(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = compile_xgrammar(Constraint(KINDS.REGEX, "[ab]+"), vocabulary)
    slow, mask = grammar.matcher(), np.zeros(token_mask_words(SIZE), dtype=np.int32)
    monkeypatch.setattr(xgrammar, "MASK_CPU_S", -1.0)
    slow.fill(mask)
    assert not mask.any()
    monkeypatch.undo()
    slow.fill(mask)
    assert not mask.any()
    grammar.matcher().fill(mask)
    assert mask.any()
