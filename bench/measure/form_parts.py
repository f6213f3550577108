"""Divides a JSON answer into parts by its schema: forced structure, enum values, numbers and free text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

NUMBER = "-+.eE0123456789"


class Part(Enum):
    """Kinds of characters of an answer.

    Attributes:
        STRUCTURE: Text that the schema forces: braces, names of properties, constants, and the quotes at the
            beginning of strings.
        TEXT: The content of strings.
        CHOICE: Values of an enum.
        NUMBER: Numbers.
        LITERAL: ``true``, ``false`` and ``null``.
        CLOSING: Characters that end a string, continue an array or end an array, where the model could also
            go on.
    """

    STRUCTURE = "structure"
    TEXT = "text"
    CHOICE = "choice"
    NUMBER = "number"
    LITERAL = "literal"
    CLOSING = "closing"


def parts_of(text: str, schema: Mapping[str, Any]) -> list[Part]:
    """Return the part of each character of an answer.

    The answer has the white space of `json.dumps`, and may be incomplete. Schemas consist of objects whose
    properties are all required, arrays, strings, enums and constants of strings, numbers, booleans, and
    `anyOf` of one such schema and null.

    Example:
        >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        >>> [part.value for part in parts_of('{"n": 7}', schema)][5:]
        ['structure', 'number', 'structure']
    """
    reader = _Reader(text)
    with suppress(_End):
        reader.value(schema)
    return (reader.parts + [Part.STRUCTURE] * len(text))[: len(text)]


class _End(Exception):
    """The answer has no further character."""


class _Reader:
    """Reads an answer from its first character to its last."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.parts: list[Part] = []

    def value(self, schema: Mapping[str, Any]) -> None:
        """Read a value.

        Raises:
            _End: The answer is complete or incomplete at this point.
        """
        if "anyOf" in schema and self._next() == "n":
            self._take(len("null"), Part.LITERAL)
            return
        schema = schema["anyOf"][0] if "anyOf" in schema else schema
        if "const" in schema:
            self._take(len(json.dumps(schema["const"])), Part.STRUCTURE)
        elif "enum" in schema:
            self._string(Part.CHOICE, Part.STRUCTURE)
        elif schema["type"] == "object":
            self._object(schema["properties"])
        elif schema["type"] == "array":
            self._array(schema["items"])
        elif schema["type"] == "string":
            self._string(Part.TEXT, Part.CLOSING)
        elif schema["type"] == "boolean":
            self._take(4 if self._next() == "t" else 5, Part.LITERAL)
        else:
            while self._next() in NUMBER:
                self._take(1, Part.NUMBER)

    def _object(self, properties: Mapping[str, Mapping[str, Any]]) -> None:
        opening = "{"
        for name, schema in properties.items():
            self._take(len(f"{opening}{json.dumps(name)}: "), Part.STRUCTURE)
            self.value(schema)
            opening = ", "
        self._take(1, Part.STRUCTURE)

    def _string(self, content: Part, closing: Part) -> None:
        self._take(1, Part.STRUCTURE)
        while self._next() != '"':
            self._take(2 if self._next() == "\\" else 1, content)
        self._take(1, closing)

    def _array(self, items: Mapping[str, Any]) -> None:
        self._take(1, Part.STRUCTURE)
        while self._next() != "]":
            if self._next() == ",":
                self._take(2, Part.CLOSING)
            self.value(items)
        self._take(1, Part.CLOSING)

    def _next(self) -> str:
        if len(self.parts) >= len(self._text):
            raise _End
        return self._text[len(self.parts)]

    def _take(self, count: int, part: Part) -> None:
        self._next()
        self.parts += [part] * count
