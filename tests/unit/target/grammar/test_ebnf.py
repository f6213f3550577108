"""Conversion to EBNF: both libraries allow the same texts, and all that cannot be converted is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest
from support.grammars.grammar_rig import FILE
from support.grammars.random_schemas import random_schema
from tokenizers import Tokenizer

from outrider.services.target.grammar import ebnf, xgrammar
from outrider.services.target.grammar.guidance import compile_guidance
from outrider.services.target.grammar.matcher import Grammar
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.services.target.grammar.xgrammar import compile_xgrammar
from outrider.shared.base.constraint import Constraint, ConstraintKind

END = 2
CLOSED = {"additionalProperties": False}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(FILE, 4096, (END,))


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(one) for one in [*tokenizer.encode(text, add_special_tokens=False).ids, END])


ABOUT = {one for bound in (-293, -7, 0, 17, 4707) for one in range(bound - 2, bound + 3)} | {
    99,
    100,
    999,
    -1000,
}
CASES: list[tuple[Any, str, str]] = [
    # The schema, and the values that it allows and does not allow, separated by spaces.
    ({"type": "null"}, "null", "nul 0"),
    ({"type": "number"}, "0 -0 -1 1e3 1.5 1.50E+9", "00 1. .5 +1"),
    ({"type": "integer"}, "0 -1 120", "00 1.5 1e3"),
    ({"type": ["boolean", "null"]}, "true false null", "1 True"),
    (
        {"type": "string"},
        r'"" "é😀" "\"" "\n" "\u000a" "a\\"',
        '"\\ud800" "\\/" "\\u12" "\x7f" "\n" "\t" "a"b" "a\\"',
    ),
    ({}, r'1 "a" {} [] null true "\u001f"', r'"\u00e9" nul {"a":1}'),
    ({"const": 'q"\\\n'}, r'"q\"\\\n"', '"q"'),
    ({"enum": [2.0, 0.1, None, True, "ö"]}, '2 0.1 null true "ö"', "2.0 1 false"),
    ({"enum": ["a", 1, None], "type": ["integer", "null"]}, "1 null", '"a"'),
    ({"type": "string", "pattern": r"^[A-Z]{2}-(?:\d|x\.)+$"}, '"AB-1" "AB-x.2"', '"AB-" "xAB-1" "AB-xy"'),
    (
        {"type": "string", "format": "date"},
        '"2024-02-29" "2000-02-29" "2023-12-31"',
        '"2023-02-29" "1900-02-29"',
    ),
    (
        {"type": "string", "format": "time"},
        '"23:59:59Z" "00:00:00.5+01:30"',
        '"23:59:60Z" "24:00:00Z" "12:00:00"',
    ),
    ({"type": "string", "format": "ipv4"}, '"0.0.0.0" "255.25.199.9"', '"256.1.1.1" "1.2.3" "01.2.3.4"'),
    ({"type": "object", **CLOSED}, "{}", "[] null"),
    (
        {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
        "[] [[]]",
        "[1] {}",
    ),
    (
        {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": 1}]}, "maxItems": 1},
        "[] [1] [null]",
        "[2]",
    ),
    ({"type": "array", "maxItems": 0}, "[]", "[1]"),
]
SPACED: list[tuple[Any, list[str], list[str]]] = [
    (
        {
            "type": "object",
            "properties": {"a": {}, "b": {"type": "null"}, "c": {}},
            "required": ["b"],
            **CLOSED,
        },
        ['{"b": null}', '{"a": 1, "b": null}', '{"b": null, "c": []}', '{"a": {"x": 1}, "b": null, "c": 2}'],
        ["{}", '{"a": 1}', '{"b": null, "a": 1}', '{, "b": null}', '{"b": null, "d": 1}', '{"b":null}'],
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, **CLOSED},
        ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}'],
        ['{"a": 2}', '{"b": 2, "a": 1}', '{"a": 1, }'],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ["{}", '{"a": 1}', '{"a b": 1, "c": 2}'],
        ['{"a": null}', '{"a": 1, "b": null}'],
    ),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        ["[1, 2]", "[1, 2, 3]"],
        ["[]", "[1]", "[1, 2, 3, 4]", "[1,2]"],
    ),
    (
        {"type": "array", "prefixItems": [{"const": "x"}, {"type": "null"}], "minItems": 2, "items": False},
        ['["x", null]'],
        ['["x"]', '["x", null, 1]'],
    ),
    ({"const": ["x", {"k": [1]}]}, ['["x", {"k": [1]}]'], ['["x",{"k": [1]}]']),
]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [*((schema, valid.split(" "), invalid.split(" ")) for schema, valid, invalid in CASES), *SPACED],
)
def test_both_libraries_allow_the_same_texts(
    vocabulary: Vocabulary, tokenizer: Tokenizer, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    asked = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    for compile_one in (compile_xgrammar, compile_guidance):
        grammar = compile_one(asked, vocabulary)
        for text in (*valid, *invalid):
            assert accepts(grammar, tokenizer, text) is (text in valid), (compile_one.__name__, text)


@pytest.mark.parametrize("low", [None, -293, -7, 0, 17])
@pytest.mark.parametrize("high", [None, -7, 0, 17, 4707])
@pytest.mark.parametrize("exclusive", [False, True])
def test_bounds_of_integers_are_exact(
    vocabulary: Vocabulary, tokenizer: Tokenizer, low: int | None, high: int | None, exclusive: bool
) -> None:
    names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
    bounds = {name: bound for name, bound in zip(names, (low, high), strict=True) if bound is not None}
    schema = {"type": "integer", **bounds}
    allowed = {one for one in ABOUT if jsonschema_rs.is_valid(schema, one)}
    try:
        grammar = compile_xgrammar(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), vocabulary)
    except xgrammar.InvalidRequestError:
        assert not allowed
        return
    assert {one for one in ABOUT if accepts(grammar, tokenizer, str(one))} == allowed


REFUSED: list[tuple[Any, str]] = [
    (False, "false"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"type": "object", "patternProperties": {}}, "patternProperties"),
    ({"type": "object", "propertyNames": {}}, "propertyNames"),
    ({"type": "object", "properties": {"a": {}}}, "additionalProperties: false"),
    ({"type": "object", "required": ["a"], **CLOSED}, "required names 'a'"),
    ({"type": "string", "maxLength": 3}, "maxLength"),
    ({"type": "string", "pattern": "a+"}, "'\\^'"),
    ({"type": "string", "pattern": "^a|b$"}, "not supported"),
    ({"type": "string", "pattern": '^"$'}, "not supported"),
    ({"type": "string", "pattern": "^\n$"}, "not supported"),
    ({"type": "string", "pattern": "^[^a]$"}, "not supported"),
    ({"type": "string", "pattern": "^.$"}, "not supported"),
    ({"type": "string", "pattern": "^a$", "format": "date"}, "pattern"),
    ({"type": "string", "format": "email"}, "email"),
    ({"type": "number", "minimum": 0}, "minimum"),
    ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    ({"type": "integer", "minimum": True}, "minimum"),
    ({"not": {}}, "not"),
    ({"if": {}, "then": {}}, "if"),
    ({"allOf": [{}]}, "allOf"),
    ({"oneOf": [{}]}, "oneOf"),
    ({"anyOf": [{}], "type": "null"}, "type"),
    ({"enum": []}, "no value"),
    ({"const": "\ud800"}, "surrogate"),
    ({"properties": {}}, "properties"),
    ({"$ref": "http://other/schema"}, "reference"),
    ({"$ref": "#/properties/a"}, "reference"),
    ({"type": "strange"}, "strange"),
    ({"type": "array", "prefixItems": [{}]}, "prefixItems"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "largest"),
]


@pytest.mark.parametrize(("schema", "part"), REFUSED)
def test_all_other_keywords_are_refused(schema: Any, part: str) -> None:
    with pytest.raises(ebnf.UnsupportedError, match=part):
        ebnf.of_schema(json.dumps(schema))


def test_a_schema_with_many_levels_is_refused() -> None:
    with pytest.raises(ebnf.UnsupportedError):
        ebnf.of_schema('{"items":' * 5000 + "{}" + "}" * 5000)


def test_most_random_schemas_are_converted_and_grow_no_faster_than_the_schema() -> None:
    rng, sizes = random.Random(3), []
    for _ in range(200):
        source = json.dumps(random_schema(rng))
        if "Length" not in source:
            sizes.append(len(ebnf.of_schema(source)) / (len(source) + 500))
    assert len(sizes) > 80
    assert max(sizes) < 8
