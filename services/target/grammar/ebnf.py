"""Converts constraints on outputs, such as JSON schemas, to EBNF grammars for xgrammar.

xgrammar's own conversion of JSON schemas ignores some keywords (``not``, ``if``, ``uniqueItems``,
``contains`` and others). It also allows some invalid JSON, such as line breaks in strings that have a maximum
length. The functions of this module convert each constraint exactly. They refuse a constraint that contains
an unknown part.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from outrider.services.target.grammar.formats import FORMATS

Json = dict[str, Any]

_ANNOTATIONS = {
    "$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title",
    "writeOnly",
}  # fmt: skip
_DEFINITIONS = {"$defs", "definitions"}
_KEYWORDS = {
    "null": set(),
    "boolean": set(),
    "string": {"format", "pattern"},
    "number": set(),
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
"""The keywords of each type that are enforced.

Lengths of strings are not, because xgrammar would need up to 0.4 s for the mask of one token.
"""
# The condition after "=" is a hint of what follows a string. Masks are made much faster with this hint.
_BASE = r"""
any ::= string | number | "true" | "false" | "null" | "[" (any (", " any)*)? "]" | object
object ::= "{" (string ": " any (", " string ": " any)*)? "}"
string ::= "\"" text
text ::= ("\"" | [^"\\\x00-\x1f\x7f] text | "\\" escape text) (=[,}\]:])
escape ::= ["\\bfnrt] | "u00" ([01] [0-9a-f] | "7f")
integer ::= "-"? nonnegative
nonnegative ::= "0" | [1-9] [0-9]*
number ::= integer ("." [0-9]+)? ([eE] [+\-]? [0-9]+)?
"""
_EMPTY = '""'
_PART = re.compile(
    r"""(?P<digit> \\d) | (?P<any> \.) | (?P<group> \( (?:\?:)?) | (?P<syntax> \) | \|)
      | (?P<times> [*+?] | \{[0-9]{1,4}(?:,(?:[0-9]{1,4})?)?\})
      | (?P<set> \[ (?P<not>\^?) (?: [A-Za-z0-9](?:-[A-Za-z0-9])? | [ _.:;,@/+*=<>!'"] )+ \])
      | \\(?P<escaped> [.^$*+?{}()|\[\]\\/-]) | (?P<plain> [^.^$*+?{}()|\[\]\\])""",
    re.VERBOSE,
)
"""One part of a regular expression that is converted. Others, such as anchors and ``\\w``, are refused."""


class UnsupportedError(Exception):
    """The constraint is malformed, or cannot be converted exactly. The message names the part."""


def of_schema(source: str) -> str:
    """Return the grammar of a JSON schema.

    Raises:
        UnsupportedError: See the class.
    """
    try:
        return _SchemaGrammar(json.loads(source)).text()
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(str(error)) from None


def of_choices(choices: Iterable[str]) -> str:
    """Return the grammar that allows exactly these texts.

    Raises:
        UnsupportedError: A text contains half of a surrogate pair.
    """
    return f"root ::= {_either(_literal(choice) for choice in choices)}\n"


def of_regex(source: str) -> str:
    """Return the grammar of the texts that a regular expression matches from start to end.

    Raises:
        UnsupportedError: See the class.
    """
    return f"root ::= {_expression(source)}\n"


class _SchemaGrammar:
    """The rules of one schema."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._rules: dict[str, str] = {}
        self._references: dict[str, str] = {}

    def text(self) -> str:
        """Return the grammar."""
        root = self._of(self._root, _DEFINITIONS)
        rules = "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())
        return f"{_BASE}{rules}root ::= {root}\n"

    def _of(self, schema: Any, others: set[str] = frozenset()) -> str:  # type: ignore[assignment]
        """Return the expression of a schema, which may also have some other keywords."""
        if schema is True:
            return "any"
        if not isinstance(schema, dict):
            raise UnsupportedError(f"the schema {json.dumps(schema)[:40]} is not supported")
        keywords = {name: value for name, value in schema.items() if name not in _ANNOTATIONS | others}
        for name, of in self._forms.items():
            if name in keywords:
                _only(keywords, {name, "type"} if name in ("const", "enum") else {name}, name)
                return of(self, keywords)
        kinds = keywords.pop("type", None)
        if kinds is None:
            _only(keywords, set(), "a schema without type")
            return "any"
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
            raise UnsupportedError("type must be a name or a list of names")
        known = set().union(*(_KEYWORDS.get(kind, ()) for kind in kinds))
        _only(keywords, known, f"type {kinds[0] if len(kinds) == 1 else kinds}")
        return _either(self._of_kind(kind, keywords) for kind in kinds)

    def _of_kind(self, kind: str, keywords: Json) -> str:
        match kind:
            case "null":
                return '"null"'
            case "boolean":
                return '("true" | "false")'
            case "number":
                return "number"
            case "string":
                return self._string(keywords)
            case "integer":
                return _integer(keywords)
            case "array":
                return self._array(keywords)
            case "object":
                return self._object(keywords)
        raise UnsupportedError(f"the type {kind!r} is unknown")

    def _reference(self, keywords: Json) -> str:
        """Return the name of the rule of a reference to this document."""
        path = keywords["$ref"]
        if path not in self._references:
            name, slash, key = str(path).rpartition("/")
            found = self._root if path == "#" else None
            if slash and name in ("#/$defs", "#/definitions") and not set(key) & set("~%"):
                found = (self._root.get(name[2:]) or {}).get(key)
            if found is None:
                raise UnsupportedError(f"the reference {path!r} is not supported")
            rule = self._references[path] = f"reference-{len(self._references)}"
            self._rules[rule] = self._of(found, _DEFINITIONS if path == "#" else set())
        return self._references[path]

    def _constants(self, keywords: Json) -> str:
        """Return the values of ``const`` or ``enum`` that have the type."""
        values = keywords["enum"] if "enum" in keywords else [keywords["const"]]
        kinds = keywords.get("type", list(_KEYWORDS))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(values, list) or not isinstance(kinds, list):
            raise UnsupportedError("enum and type must be lists")
        values = [int(one) if isinstance(one, float) and one.is_integer() else one for one in values]
        texts = [
            json.dumps(value, ensure_ascii=False)
            for value in values
            if any(_has(kind, value) for kind in kinds)
        ]
        return _either(_literal(text.replace("\x7f", "\\u007f")) for text in texts)

    def _any_of(self, keywords: Json) -> str:
        if not isinstance(keywords["anyOf"], list):
            raise UnsupportedError("anyOf must be a list")
        return _either(self._of(one) for one in keywords["anyOf"])

    _forms: dict[str, Callable[[_SchemaGrammar, Json], str]] = {  # noqa: RUF012
        "$ref": _reference,
        "const": _constants,
        "enum": _constants,
        "anyOf": _any_of,
    }

    def _string(self, keywords: Json) -> str:
        if "pattern" in keywords:
            _only(keywords, {"pattern"}, "pattern")
            return rf'"\"" {_pattern(keywords["pattern"])} "\""'
        if "format" in keywords:
            _only(keywords, {"format"}, "format")
            if keywords["format"] not in FORMATS:
                raise UnsupportedError(f"the format {keywords['format']!r} is not supported")
            return rf'"\"" {_expression(FORMATS[keywords["format"]])} "\""'
        return "string"

    def _array(self, keywords: Json) -> str:
        first = keywords.get("prefixItems", [])
        if not isinstance(first, list):
            raise UnsupportedError("prefixItems must be a list")
        rest = keywords.get("items", True)
        least, most = _count(keywords, "minItems") or 0, _count(keywords, "maxItems")
        if rest is False:
            most = min(len(first), len(first) if most is None else most)
        if first and not least == most == len(first):
            raise UnsupportedError("prefixItems need minItems and items that fix the number of items")
        _times(least, most)
        if first or most == 0:
            return " ".join(['"["', '", "'.join(f" {self._of(one)} " for one in first), '"]"'])
        item = self._rule(self._of(rest))
        more = _times(max(least - 1, 0), None if most is None else most - 1)
        return f'"[" ({item} (", " {item}){more}){"" if least else "?"} "]"'

    def _object(self, keywords: Json) -> str:
        properties, required = keywords.get("properties", {}), keywords.get("required", [])
        open_to = keywords.get("additionalProperties", True)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise UnsupportedError("properties must be an object, and required a list")
        if missing := [name for name in required if name not in properties]:
            raise UnsupportedError(f"required names {missing[0]!r}, but properties does not")
        if open_to is not False:
            if properties:
                raise UnsupportedError("objects with properties need additionalProperties: false")
            pair = self._rule(f'string ": " {self._of(open_to)}')
            return f'"{{" ({pair} (", " {pair})*)? "}}"'
        # Rule `first` expects the first of the remaining properties, and rule `rest` all further ones.
        first = rest = _EMPTY
        for name, value in reversed(properties.items()):
            pair = self._rule(f'{_literal(json.dumps(name, ensure_ascii=False))} ": " {self._of(value)}')
            if name in required:
                first, rest = self._rule(f"{pair} {rest}"), self._rule(f'", " {pair} {rest}')
            else:
                first, rest = self._rule(f"{pair} {rest} | {first}"), self._rule(f'(", " {pair})? {rest}')
        return f'"{{" {first} "}}"'

    def _rule(self, body: str) -> str:
        """Return the name of a new rule."""
        name = f"part-{len(self._rules)}"
        self._rules[name] = body
        return name


def _only(keywords: Json, known: Iterable[str], where: str) -> None:
    """Refuse every keyword that is not known."""
    if others := sorted(set(keywords) - set(known)):
        raise UnsupportedError(f"{where} with {others[0]!r} is not supported")


def _has(kind: str, value: Any) -> bool:
    """Return whether a JSON value has a type."""
    if isinstance(value, bool):
        return kind == "boolean"
    kinds: dict[str, Any] = {"null": type(None), "string": str, "number": (int, float), "integer": int}
    return isinstance(value, kinds.get(kind, list if kind == "array" else dict if kind == "object" else ()))


def _count(keywords: Json, name: str) -> int | None:
    value = keywords.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UnsupportedError(f"{name} must be a number of at least 0")
    return value


def _times(least: int, most: int | None) -> str:
    """Return the repetition from `least` to `most` times."""
    if most is not None and most < least:
        raise UnsupportedError("the largest number must not be below the least")
    return f"{{{least},{'' if most is None else most}}}"


def _either(alternatives: Iterable[str]) -> str:
    joined = " | ".join(f"({one})" for one in alternatives)
    if not joined:
        raise UnsupportedError("no value is allowed")
    return f"({joined})"


def _literal(text: str) -> str:
    """Return the expression of exactly this text."""
    if any("\ud800" <= one <= "\udfff" for one in text):
        raise UnsupportedError("a text contains half of a surrogate pair")
    escaped = (one if one.isprintable() and one not in '"\\' else f"\\U{ord(one):08x}" for one in text)
    return f'"{"".join(escaped)}"'


def _pattern(source: Any) -> str:
    """Return the expression of a pattern in a schema. It must be anchored, and need no escapes in JSON."""
    if not isinstance(source, str) or not (source.startswith("^") and source.endswith("$")):
        raise UnsupportedError("pattern must begin with '^' and end with '$'")
    return _expression(source[1:-1], in_json=True)


def _expression(source: str, in_json: bool = False) -> str:
    """Return the expression of a regular expression."""
    parts, place, depth = [], 0, 0
    while place < len(source):
        part = _PART.match(source, place)
        shown = repr(source[place : place + 20])
        if part is None or (in_json and not _fits_json(part, depth)):
            raise UnsupportedError(f"the expression {shown} is not supported")
        depth += (part["group"] is not None) - (part[0] == ")")
        if depth < 0:
            raise UnsupportedError(f"the parenthesis {shown} is not opened")
        parts.append(_converted(part))
        place = part.end()
    if depth:
        raise UnsupportedError("a parenthesis is not closed")
    return f"({' '.join(parts) or _EMPTY})"


def _fits_json(part: re.Match[str], depth: int) -> bool:
    """Return whether a part needs no escapes in JSON, and does not end the range of an anchor."""
    plain = part["escaped"] or part["plain"] or part["set"] or ""
    ends_anchor = part[0] == "|" and not depth
    return plain.isprintable() and not (part["any"] or part["not"] or ends_anchor or set('"\\') & set(plain))


def _converted(part: re.Match[str]) -> str:
    match part.lastgroup:
        case "digit":
            return "[0-9]"
        case "any":
            return r"[^\n]"
        case "group":
            return "("
        case "escaped" | "plain":
            return _literal(part[part.lastgroup])
    return part[0]


def _integer(keywords: Json) -> str:
    """Return the expression of the integers within the bounds."""
    if keywords.get("multipleOf", 1) != 1:
        raise UnsupportedError("integers with 'multipleOf' are not supported")
    for name, bound in keywords.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
            raise UnsupportedError(f"{name} must be a number")
    low = [math.ceil(keywords["minimum"])] if "minimum" in keywords else []
    low += [math.floor(keywords["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in keywords else []
    high = [math.floor(keywords["maximum"])] if "maximum" in keywords else []
    high += [math.ceil(keywords["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in keywords else []
    if not low and not high:
        return "integer"
    least, most = max(low, default=None), min(high, default=None)
    parts = []
    if least is None or least < 0:
        parts += [
            f'"-" ({one})' for one in _range(max(1, -most) if most is not None else 1, least and -least)
        ]
    if most is None or most >= 0:
        parts += _range(max(0, least or 0), most)
    return _either(parts)


def _range(least: int, most: int | None) -> list[str]:
    """Return expressions for the numbers from `least`, which is at least 0, to `most`, or without an end."""
    if most is None:
        digits = len(str(least))
        return [*_range(least, 10**digits - 1), f"[1-9] [0-9]{{{digits},}}"]
    parts = []
    for digits in range(len(str(least)), len(str(most)) + 1):
        start, end = max(least, 10 ** (digits - 1) if digits > 1 else 0), min(most, 10**digits - 1)
        if start <= end:
            parts.append(_between(str(start), str(end)))
    return parts


def _between(low: str, high: str) -> str:
    """Return the expression of the numbers between two numbers with equally many digits."""
    if not low:
        return _EMPTY
    if low[0] == high[0]:
        return f'"{low[0]}" {_between(low[1:], high[1:])}'
    zeros, nines = "0" * len(low[1:]), "9" * len(low[1:])
    parts, first, last = [], int(low[0]), int(high[0])
    if low[1:] != zeros:
        parts.append(f'"{first}" {_between(low[1:], nines)}')
        first += 1
    if high[1:] != nines:
        parts.append(f'"{last}" {_between(zeros, high[1:])}')
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}] [0-9]{{{len(zeros)}}}" if zeros else f"[{first}-{last}]")
    return _either(parts)
