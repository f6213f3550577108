"""Builds the Lark grammar of an answer that must consist of tool calls, in the format of each parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.services.gateway.parsers.deepseek_v3 import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    FENCE,
    SEPARATOR,
)
from outrider.services.gateway.parsers.harmony import FUNCTIONS, MESSAGE
from outrider.services.gateway.parsers.hermes import CLOSE, OPEN
from outrider.services.gateway.parsers.mistral import MARKER
from outrider.services.gateway.parsers.python_literal import PARAMETER_NAME
from outrider.shared.base.constraint import JSON_STYLE, Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError

ARGS = "[ARGS]"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
MOST_OPTIONAL = 24
"""Number of optional arguments that a pythonic call may have."""
_TOOL_NAME = re.compile(r"[\w.\-]+", re.ASCII)
_NAMES_AS_JSON = ("hermes", "llama3-json")
"""The parsers whose format writes names as JSON strings, so that every name is possible."""
_KEYWORD_SCHEMA = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
        *("$schema", "title", "description"),
    )
)
"""The keywords of a schema that keyword arguments can follow. Other schemas need a whole JSON object."""
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format in which a model writes tool calls.

    Attributes:
        parser: Name of the parser that reads the calls. It is a key of `TOOL_PARSERS`.
        special: Maps each special token of the model's tokenizer to its id.
        template: The text of the model's chat template.
        parallel: Whether an answer may contain several calls.
    """

    parser: str
    special: Mapping[str, int]
    template: str = ""
    parallel: bool = True

    def literal(self, text: str) -> str:
        """Return the Lark expression of a text.

        Special tokens in the text become tokens in the expression.
        """
        names = [re.escape(name) for name in sorted(self.special, key=len, reverse=True) if name in text]
        parts = re.split(f"({'|'.join(names)})", text) if names else [text]
        return " ".join(
            f"<[{self.special[part]}]>" if part in self.special else json.dumps(part)
            for part in parts
            if part
        )

    def repeated(self, separator: str = "") -> str:
        """Return the Lark expression of one call. If `parallel` is set, further calls may follow."""
        more = f"({self.literal(separator)} call)*" if separator else "call*"
        return f"call {more}" if self.parallel else "call"


def calls_constraint(tools: Sequence[Tool], form: CallFormat, answer: Constraint | None = None) -> Constraint:
    """Return the constraint of an answer that may, or must, consist of tool calls.

    Args:
        tools: The tools that the answer may call, in the format that chat templates expect.
        form: How the model writes tool calls.
        answer: A JSON schema for an answer without tool calls. With None, the answer must call a tool.

    Raises:
        InvalidRequestError: The format cannot express the name or the parameters of a tool.
    """
    for tool in tools:
        _check_tool(tool, form)
    lines = _FORMATS[form.parser](tools, form)
    lines[0] = f"start: {lines[0]}" if answer is None else f"start: calls | answer\ncalls: {lines[0]}"
    if answer is not None:
        before = _final(form) if form.parser == HARMONY else ""
        lines.append(f"answer: {before}{_json(json.loads(answer.source))}")
    field = "tool_choice" if answer is None else answer.field
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(lines), field=field)


def _hermes(tools: Sequence[Tool], form: CallFormat) -> list[str]:
    begin, end = form.literal(OPEN), form.literal(CLOSE)
    lines = [form.repeated("\n"), f'call: {begin} "\\n" object "\\n" {end}']
    return [*lines, *_objects(tools, "arguments")]


def _llama3_json(tools: Sequence[Tool], form: CallFormat) -> list[str]:
    return [form.repeated("; "), "call: object", *_objects(tools, "parameters")]


def _mistral(tools: Sequence[Tool], form: CallFormat) -> list[str]:
    marker = form.literal(MARKER)
    if ARGS not in form.special:
        return [f'{marker} "[" {form.repeated(", ")} "]"', "call: object", *_objects(tools, "arguments")]
    between = form.literal(ARGS)
    calls = [f"{marker} {_name(tool)} {between} {_json(_schema(tool))}" for tool in tools]
    return [form.repeated(), *_alternatives(calls)]


def _deepseek_v3(tools: Sequence[Tool], form: CallFormat) -> list[str]:
    begin, end, middle = (form.literal(text) for text in (CALL_BEGIN, CALL_END, SEPARATOR))
    calls = []
    for tool in tools:
        arguments = _json(_schema(tool))
        if FENCE.strip() in form.template or json.dumps(FENCE)[1:-1] in form.template:
            calls.append(
                f'{begin} "function" {middle} {_name(tool, f"{chr(10)}{FENCE}")} {arguments} "\\n```" {end}'
            )
        else:
            calls.append(f"{begin} {_name(tool)} {middle} {arguments} {end}")
    whole = f"{form.literal(CALLS_BEGIN)} {form.repeated()} {form.literal(CALLS_END)}"
    return [whole, *_alternatives(calls)]


def _harmony(tools: Sequence[Tool], form: CallFormat) -> list[str]:
    channel, constrain, message = (form.literal(text) for text in (CHANNEL, CONSTRAIN, MESSAGE))
    calls = []
    for tool in tools:
        header = json.dumps(f"commentary to={FUNCTIONS}{tool['function']['name']} ")
        calls.append(f'{channel} {header} {constrain} "json" {message} {_json(_schema(tool))}')
    begin, end = form.literal("<|start|>assistant"), form.literal("<|end|>")
    # The text of the reasoning contains no "<|", with which special tokens begin.
    reasoning = f'reasoning: {channel} "analysis" {message} /([^<]|<+[^<|])*<*/ {end} {begin}'
    return ["reasoning* call", reasoning, *_alternatives(calls)]


def _final(form: CallFormat) -> str:
    """Return the Lark expression of the text that precedes the final answer in the harmony format."""
    return f'reasoning* {form.literal(CHANNEL)} "final" {form.literal(MESSAGE)} '


def _pythonic(tools: Sequence[Tool], form: CallFormat) -> list[str]:
    calls = [f'{_name(tool, "(")} {_python_arguments(_schema(tool))} ")"' for tool in tools]
    return [f'"[" {form.repeated(", ")} "]"', *_alternatives(calls)]


HARMONY = "harmony"
_FORMATS: dict[str, Callable[[Sequence[Tool], CallFormat], list[str]]] = {
    "deepseek-v3": _deepseek_v3,
    HARMONY: _harmony,
    "hermes": _hermes,
    "llama3-json": _llama3_json,
    "mistral": _mistral,
    "pythonic": _pythonic,
}


def _objects(tools: Sequence[Tool], key: str) -> list[str]:
    """Return the rule ``object``: a JSON object with the tool's name, and with its arguments under `key`."""
    made = []
    for tool in tools:
        head = f'{{"name": {json.dumps(tool["function"]["name"])}, "{key}": '
        made.append(f'{json.dumps(head)} {_json(_schema(tool))} "}}"')
    return _alternatives(made, "object")


def _alternatives(made: Sequence[str], rule: str = "call") -> list[str]:
    names = [f"{rule}_{number}" for number in range(len(made))]
    return [
        f"{rule}: {' | '.join(names)}",
        *[f"{name}: {one}" for name, one in zip(names, made, strict=True)],
    ]


def _name(tool: Tool, end: str = "") -> str:
    return json.dumps(tool["function"]["name"] + end)


def _check_tool(tool: Tool, form: CallFormat) -> None:
    name, kind = str(tool["function"]["name"]), _schema(tool)["type"]
    if form.parser not in _NAMES_AS_JSON and not _TOOL_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"tools: the name {name[:64]!r} must consist of ASCII letters, digits, '_', '-' and '.', because "
            f"the model writes calls in the format {form.parser}.",
            field="tools",
        )
    if kind != "object":
        raise InvalidRequestError(
            f"tools: the parameters of {name[:64]!r} must be a JSON schema of type 'object'.", field="tools"
        )


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of the tool's arguments. A tool without `parameters` takes no arguments."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object"} | dict(tool["function"].get("parameters") or nothing)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


def _python_arguments(schema: Mapping[str, Any]) -> str:
    """Return the Lark expression of a pythonic call's arguments: keyword arguments, or ``**`` and an object.

    The second form is for schemas that keyword arguments cannot express, such as names with a hyphen.
    """
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    if (
        not re.search(r'"\$ref": "(?!#/(\$defs|definitions)/)', json.dumps(schema))
        and _KEYWORD_SCHEMA.issuperset(schema)
        and isinstance(properties, dict)
        and all(PARAMETER_NAME.fullmatch(name) for name in properties)
        and all(isinstance(value, dict) for value in properties.values())
        and set(required) <= set(properties)
    ):
        return _keywords(schema, properties, required)
    return f'"**" {_json(schema)}'


def _keywords(schema: Mapping[str, Any], properties: Mapping[str, Any], required: Sequence[str]) -> str:
    """Return the Lark expression of keyword arguments: the required ones, followed by any optional ones."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    values = {
        name: f"{json.dumps(f'{name}=')} {_json({**value, **shared})}" for name, value in properties.items()
    }
    needed = [values[name] for name in values if name in required]
    optional = [values[name] for name in values if name not in required][:MOST_OPTIONAL]
    if needed:
        return " ".join([' ", " '.join(needed), *[f'(", " {one})?' for one in optional]])
    chains = [
        " ".join([one, *[f'(", " {other})?' for other in optional[number + 1 :]]])
        for number, one in enumerate(optional)
    ]
    return f"({' | '.join(chains)})?" if chains else ""
