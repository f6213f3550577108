"""Every text that the grammar of a forced call allows is parsed as a call that matches the tool's schema."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.grammars.grammar_rig import ENDS, FILE, SIZE
from support.grammars.random_schemas import random_schema

from outrider.services.gateway.parsers.answer import AnswerReader, CalledTool
from outrider.services.gateway.parsers.forced import CallFormat, calls_constraint
from outrider.services.gateway.parsers.pieces import ToolOptions
from outrider.services.gateway.parsers.registry import TOOL_PARSERS, ParserNames
from outrider.services.target.grammar.guidance import compile_guidance
from outrider.services.target.grammar.matcher import token_mask_words
from outrider.services.target.grammar.vocabulary import Vocabulary
from outrider.shared.base.errors import InvalidRequestError

VOCABULARY = Vocabulary(FILE, SIZE, ENDS)
MOST_TOKENS = 400
# Random reasoning of a harmony model would never end.
STARTS = {"harmony": "<|channel|>commentary"}
NAMES = ("from", "class", "x-id", "größe", "a b", "a", "größer", "_", "true", 'quo"te', "next")


def finite(text: str) -> float:
    """Read a number. One beyond the range of a float, which JSON allows, becomes the largest float."""
    limit = sys.float_info.max
    return min(max(float(text), -limit), limit)


def tool(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def written(parser: str, tools: list[Any], seed: int, parallel: bool) -> str | None:
    """Return a random text that the grammar allows, or None if it became too long."""
    constraint = calls_constraint(tools, CallFormat(parser, {}, parallel=parallel))
    matcher = compile_guidance(constraint, VOCABULARY).matcher()
    rng, output = random.Random(seed), b""
    mask = np.zeros(token_mask_words(SIZE), dtype=np.int32)
    for token in VOCABULARY.tokenizer.tokenize_str(STARTS.get(parser, "")):
        assert matcher.accept(token)
        output += VOCABULARY.texts[token]
    for _ in range(MOST_TOKENS):
        matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), output
        ends = [token for token in allowed if token in ENDS]
        # A text ends as soon as it may, three times in four, so that it stays short.
        token = int(ends[0]) if ends and rng.random() < 0.75 else int(rng.choice(allowed))
        assert matcher.accept(token)
        if token in ENDS:
            return output.decode("utf-8")
        output += VOCABULARY.texts[token]
    return None


def calls_in(
    parser: str, text: str, names: list[str], seed: int = 0, *, forced: bool = False
) -> tuple[str, list[CalledTool]]:
    """Return the text and the calls of an answer that arrives in random parts."""
    allowed = frozenset(names)
    options = ToolOptions(allowed, forced=allowed if forced else frozenset())
    reader = AnswerReader(ParserNames(parser).create(options, True, ""))
    rng, at = random.Random(seed), 0
    while at < len(text):
        size = rng.randrange(1, 8)
        reader.push(text[at : at + size], 1)
        at += size
    reader.finish()
    return reader.answer.text, reader.answer.tool_calls


def check_calls(parser: str, schemas: dict[str, dict[str, Any]], seed: int, parallel: bool) -> bool:
    """Check one random answer. Return False if it became too long."""
    tools = [tool(schema, name) for name, schema in schemas.items()]
    text = written(parser, tools, seed, parallel)
    if text is None:
        return False
    content, calls = calls_in(parser, text, list(schemas), seed)
    assert calls, text
    assert not content, text
    assert parallel or len(calls) == 1
    for call in calls:
        arguments = json.loads(call.arguments, parse_float=finite)
        assert jsonschema_rs.is_valid(schemas[call.name], arguments), call
        call.arguments.encode("utf-8")
    return True


def renamed(schema: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the schema with parameter names that Python's syntax makes difficult."""
    names = dict(zip(schema["properties"], rng.sample(NAMES, len(schema["properties"])), strict=True))
    return schema | {
        "properties": {names[name]: value for name, value in schema["properties"].items()},
        "required": [names[name] for name in schema["required"]],
    }


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
@settings(deadline=None, max_examples=12, derandomize=True)
@given(seed=st.integers(0, 1 << 32), parallel=st.booleans())
def test_what_the_grammar_allows_is_a_valid_call(parser: str, seed: int, parallel: bool) -> None:
    rng = random.Random(seed)
    schemas = {name: renamed(random_schema(rng), rng) for name in rng.choice([["f"], ["f", "g.h", "f-2"]])}
    assume(check_calls(parser, schemas, seed, parallel))


BOOLEANS = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
WORDS = {"type": "object", "properties": {"b": {"enum": [None, True, False]}}, "required": ["b"]}


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
@pytest.mark.parametrize(
    "schema",
    [
        closed({"a": BOOLEANS}),
        closed({"a": WORDS | {"additionalProperties": False}}),
        closed({"from": {"enum": ["x"]}, "class": {"const": 1}}),
        closed({"x-id": {"enum": ["x"]}}),
        closed({"x-id": {"enum": ["x"]}, "a": {"type": "boolean"}}, ["x-id"]),
        closed({"a": {"$ref": "#/properties/b"}, "b": {"type": "boolean"}}),
        closed({"a": {"$ref": "#/$defs/b"}}) | {"$defs": {"b": {"type": "boolean"}}},
        {"type": "object", "anyOf": [closed({"a": {"const": 1}}), closed({"b": {"const": 2}})]},
        closed({"a": {"type": "string", "maxLength": 2}, "b": {"type": "number"}}),
        closed({}),
    ],
    ids=lambda schema: json.dumps(schema)[:80],
)
def test_schemas_that_a_format_could_lose_are_kept(parser: str, schema: dict[str, Any]) -> None:
    assert any(check_calls(parser, {"f": schema}, seed, False) for seed in range(3))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f(a=[false, null], b={'c': true})", '{"a": [false, null], "b": {"c": true}}'),
        (r'f(a="\/", b="\ud83d\ude00", c="\ud83d")', '{"a": "/", "b": "\U0001f600", "c": "\\ud83d"}'),
        (r"f(a='\u00e9\n', b=r'\d')", '{"a": "é\\n", "b": "\\\\d"}'),
        ("f(a=1e400, b=0x10, c=1.50, d=.5, e=-1)", '{"a": 1e400, "b": 16, "c": 1.50, "d": 0.5, "e": -1}'),
        ("f(a=(1,), b=(2), c=(), d=[[],],)", '{"a": [1], "b": 2, "c": [], "d": [[]]}'),
        ('f(a=1, **{"x-id": {"y": 2}})', '{"a": 1, "x-id": {"y": 2}}'),
        ("f(**{1: 'x', })", '{"1": "x"}'),
        ("f(a='x' \"y\")", '{"a": "xy"}'),
    ],
)
def test_python_arguments_become_json(text: str, arguments: str) -> None:
    content, calls = calls_in("pythonic", f"[{text}]", ["f"])
    assert [call.arguments for call in calls] == [arguments]
    assert not content
    json.loads(arguments)


@pytest.mark.parametrize(
    "arguments",
    ["1", "a", "a=b", "a=1, a=2", "**a", "a=1 b=2", "a=[1 2]", "a={1}", "a=1+2", "a=" + "[" * 99 + "]" * 99],
)
def test_other_python_is_text(arguments: str) -> None:
    text = f"[f({arguments})]"
    assert calls_in("pythonic", text, ["f"]) == (text, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(", "{"),
        ("[f(aa", "{"),
        ("[f(a=1, b=[1, ", '{"a": 1, "b": [1, '),
        ("[f(a='it\\'s \\u00", '{"a": "it\'s '),
        ('[f(a={"b": "c', '{"a": {"b": "c'),
    ],
)
def test_a_pythonic_call_that_is_cut_off_has_the_arguments_so_far(text: str, arguments: str) -> None:
    content, (call,) = calls_in("pythonic", text, ["f"])
    assert (content, call.name, call.arguments) == ("", "f", arguments)


@pytest.mark.parametrize("parser", ["pythonic", "deepseek-v3", "harmony"])
def test_a_name_that_a_format_cannot_write_is_refused(parser: str) -> None:
    with pytest.raises(InvalidRequestError, match="'a b' must consist of") as caught:
        calls_constraint([tool(closed({}), "a b")], CallFormat(parser, {}))
    assert caught.value.field == "tools"


@pytest.mark.parametrize("parser", sorted(TOOL_PARSERS))
@pytest.mark.parametrize("names", [["f"], ["f", "get_weather"]], ids=str)
def test_a_forced_call_that_is_cut_off_anywhere_is_no_text(parser: str, names: list[str]) -> None:
    schema = closed({"city": {"enum": ["Paris, 5e"]}, "days": {"enum": [[1, 2]]}})
    whole = written(parser, [tool(schema, name) for name in names], 0, False)
    assert whole is not None
    _, (called,) = calls_in(parser, whole, names, forced=True)
    for end in range(len(whole)):
        content, calls = calls_in(parser, whole[:end], names, forced=True)
        assert not content, whole[:end]
        assert len(calls) <= 1
        for call in calls:
            assert call.name == called.name
            assert called.arguments.startswith(call.arguments)
        if len(names) == 1 and end and parser != "harmony":
            assert calls, whole[:end]


def test_text_of_a_target_that_does_not_enforce_a_call_is_kept() -> None:
    assert calls_in("hermes", 'I would. <tool_call>{"na', ["f"], forced=True)[0].startswith("I would.")


def test_markers_in_the_arguments_of_a_harmony_call_are_text() -> None:
    text = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|end|>"}<|call|>'
    content, (call,) = calls_in("harmony", text, ["f"])
    assert (content, call.arguments) == ("", '{"a": "<|end|>"}')
