"""What both grammar libraries must do, on the embedded model's vocabulary, and the choice between them."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from support.grammars.grammar_rig import ENDS, SIZE, allows
from tokenizers import Tokenizer

from outrider.services.target.grammar import backend
from outrider.services.target.grammar.backend import GrammarBackend, compile_grammar, versions_of
from outrider.services.target.grammar.fill import fill_all
from outrider.services.target.grammar.form import OutputForm
from outrider.services.target.grammar.guidance import GuidanceGrammar
from outrider.services.target.grammar.matcher import Grammar, token_mask_words
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.services.target.grammar.xgrammar import XGrammar
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import ConfigurationError, InvalidRequestError

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
KINDS = ConstraintKind
Compile = Callable[[ConstraintKind, str], Grammar]


@pytest.fixture(params=[GrammarBackend.LLGUIDANCE, GrammarBackend.XGRAMMAR])
def compiled(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Compile:
    return lambda kind, source: compile_grammar(Constraint(kind, source), vocabulary, request.param)


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        (KINDS.JSON_SCHEMA, SCHEMA, '{"a": 12}'),
        (KINDS.JSON_SCHEMA, '{"type": "object"}', "{}"),
        (KINDS.REGEX, "[a-c]+x?", "abcx"),
        (KINDS.CHOICE, '["yes", "nö \\"quoted\\"\\n"]', 'nö "quoted"\n'),
        (KINDS.GRAMMAR, 'root ::= "yes" | "no" num\nnum ::= [0-9]+', "no12"),
    ],
)
def test_a_text_of_the_form_is_accepted_and_may_end(
    compiled: Compile, tokenizer: Tokenizer, kind: ConstraintKind, source: str, text: str
) -> None:
    matcher = compiled(kind, source).matcher()
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


def test_a_refused_token_changes_nothing(compiled: Compile, tokenizer: Tokenizer) -> None:
    matcher = compiled(KINDS.REGEX, "[ab]+").matcher()
    (a, z) = (tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "az")
    assert not matcher.accept(ENDS[0])
    assert not matcher.accept(z)
    assert matcher.accept(a)
    assert allows(matcher, ENDS[0])


def test_text_that_only_one_way_can_go_on_is_forced(compiled: Compile, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"population": {"type": "integer"}}, "required": ["population"]}
    matcher = compiled(KINDS.JSON_SCHEMA, json.dumps(schema | {"additionalProperties": False})).matcher()
    assert matcher.accept(tokenizer.encode("{", add_special_tokens=False).ids[0])
    assert matcher.accept(tokenizer.encode('"', add_special_tokens=False).ids[0])
    assert tokenizer.decode(matcher.forced()).startswith("population")


def test_strings_take_text_and_enums_do_not(compiled: Compile, tokenizer: Tokenizer) -> None:
    string, choice = {"type": "string"}, {"enum": ["river", "lake", "sea"]}
    schema = {"type": "object", "properties": {"free": string, "one": choice}, "required": ["free", "one"]}
    form = OutputForm(compiled(KINDS.JSON_SCHEMA, json.dumps(schema | {"additionalProperties": False})))
    output: list[int] = []
    for text, free in (('{"free": "', True), ("Abc", True), ('", "one": "', False)):
        output += tokenizer.encode(text, add_special_tokens=False).ids
        form.settle(output)
        assert form.takes_text() == free
        assert form.next_mask().any(), "the form is where it was"
    form.settle([*output, 0])
    assert form.dead
    assert not form.takes_text()


def test_nothing_but_the_character_may_be_forced_inside_a_character(
    compiled: Compile, tokenizer: Tokenizer
) -> None:
    matcher = compiled(KINDS.CHOICE, '["😀 smile"]').matcher()
    tokens = tokenizer.encode("😀", add_special_tokens=False).ids
    assert len(tokens) > 1
    for token in tokens:
        assert isinstance(matcher.forced(), list)
        assert matcher.accept(token)
    assert tokenizer.decode(matcher.forced()) == " smile"


def test_json_is_written_like_python_writes_it(compiled: Compile, tokenizer: Tokenizer) -> None:
    grammar = compiled(KINDS.JSON_SCHEMA, SCHEMA)
    for text in ('{"a":1}', '{ "a": 1}', '{\n"a": 1}'):
        matcher = grammar.matcher()
        assert not all(matcher.accept(t) for t in tokenizer.encode(text, add_special_tokens=False).ids)


def test_special_tokens_are_found_by_their_text(compiled: Compile) -> None:
    grammar = compiled(KINDS.REGEX, "a")
    assert grammar.token_of("<|im_end|>") == 2
    assert grammar.token_of("<nothing>") is None
    assert grammar.text_of(2) == b"<|im_end|>"
    assert (grammar.ends(), grammar.vocab_size) == (ENDS, SIZE)


@pytest.mark.parametrize(
    ("kind", "source", "library"),
    [
        (KINDS.JSON_SCHEMA, SCHEMA, XGrammar),
        (KINDS.JSON_SCHEMA, '{"type": "string", "maxLength": 3}', GuidanceGrammar),
        (KINDS.CHOICE, '["a"]', XGrammar),
        (KINDS.REGEX, "a", GuidanceGrammar),
        (KINDS.GRAMMAR, 'root ::= "a"', GuidanceGrammar),
    ],
)
def test_auto_chooses_a_library_that_enforces_the_constraint(
    vocabulary: Vocabulary, kind: ConstraintKind, source: str, library: type
) -> None:
    made = compile_grammar(Constraint(kind, source), vocabulary, GrammarBackend.AUTO)
    assert isinstance(made, library)


def test_auto_reports_the_error_of_llguidance_if_neither_library_enforces_the_constraint(
    vocabulary: Vocabulary,
) -> None:
    asked = Constraint(KINDS.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}')
    with pytest.raises(InvalidRequestError, match="not supported: 'uniqueItems'"):
        compile_grammar(asked, vocabulary, GrammarBackend.AUTO)


def test_grammars_are_cached_under_the_name_and_the_versions_of_their_libraries() -> None:
    assert versions_of(GrammarBackend.LLGUIDANCE).startswith("llguidance llguidance-1.")
    assert "xgrammar-0." in versions_of(GrammarBackend.AUTO)
    assert len({versions_of(one) for one in GrammarBackend}) == 3


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    GrammarBackend.LLGUIDANCE.check_installed()
    with pytest.raises(ConfigurationError, match=r"outrider\[xgrammar\]"):
        GrammarBackend.AUTO.check_installed()


def test_a_forked_matcher_goes_its_own_way(compiled: Compile, tokenizer: Tokenizer) -> None:
    matcher = compiled(KINDS.REGEX, "(ab|ba)c").matcher()
    a, b, c = (tokenizer.encode(text, add_special_tokens=False).ids[0] for text in "abc")
    assert matcher.accept(a)
    forked = matcher.fork()
    assert forked.accept(b)
    assert forked.accept(c)
    assert forked.accept(ENDS[0])
    assert not allows(forked.fork(), a), "a fork of an output that has ended has ended"
    assert allows(matcher, b)
    assert not allows(matcher, c)
    forked.rollback(3)
    assert allows(forked, b)


def test_masks_found_together_are_those_found_one_by_one(compiled: Compile, tokenizer: Tokenizer) -> None:
    """Also if a form has ended, forbids everything, or is in its free part."""
    grammar = compiled(KINDS.JSON_SCHEMA, SCHEMA)
    forms = [OutputForm(grammar) for _ in range(9)]
    for length, form in enumerate(forms):
        text = tokenizer.encode('{"a": 12}', add_special_tokens=False).ids
        form.settle([*text, ENDS[0]][:length])
    forms.append(OutputForm(grammar))
    forms[-1].settle(tokenizer.encode("x", add_special_tokens=False).ids)
    forms.append(OutputForm(grammar, Constraint(KINDS.JSON_SCHEMA, SCHEMA, begins_after="</think>")))
    together = np.zeros((len(forms), token_mask_words(SIZE)), dtype=np.int32)
    fill_all(list(zip(forms, together, strict=True)))
    for form, mask in zip(forms, together, strict=True):
        assert (form.fork().next_mask() == mask).all()
    assert forms[-2].dead
    assert len({mask.tobytes() for mask in together}) > 4
