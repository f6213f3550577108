"""Converts the arguments of a call in Python syntax, such as ``(city="Paris", days=2)``, to JSON text."""

from __future__ import annotations

import ast
import json
import re

PARAMETER_NAME = re.compile(r"[^\W\d]\w*")
"""Matches a parameter name that a keyword argument can have. Python's own keywords are allowed too."""
MAX_DEPTH = 64
_STRING = re.compile(r"""[rRuU]?(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", re.DOTALL)
_OPEN_STRING = re.compile(r"""(?:"(?:[^"\\]|\\.)*|'(?:[^'\\]|\\.)*)""", re.DOTALL)
_WORD = re.compile(r"[-+]?[\w.]+(?:(?<=[eE])[-+]\w+)?", re.ASCII)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")
# Models also write JSON's words instead of Python's.
_WORDS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}


def arguments_json(text: str) -> str | None:
    """Return the arguments of a complete call as a JSON object, or None if an argument is not a literal.

    Args:
        text: The arguments in parentheses. Each is a keyword argument, or a dictionary after two stars.
    """
    reader = _ArgumentsReader(text)
    try:
        reader.read()
    except _SyntaxError:
        return None
    return "".join(reader.json) if reader.at == len(text) else None


def partial_arguments_json(text: str) -> str:
    """Return the JSON text of arguments that end too early, as far as the model wrote them."""
    reader = _ArgumentsReader(text)
    try:
        reader.read()
    except _SyntaxError:
        reader.add_open_string()
    return "".join(reader.json)


class _SyntaxError(Exception):
    """The text is not a list of literal arguments."""


class _ArgumentsReader:
    """Reads the arguments of a call from left to right, and writes each value as JSON text.

    Attributes:
        json: The JSON text of the part that has been read.
        at: Offset of the next character.
    """

    def __init__(self, text: str) -> None:
        self.json: list[str] = []
        self.at = 0
        self._text = text
        self._names: set[str] = set()

    def read(self) -> None:
        """Read all arguments.

        Raises:
            _SyntaxError: The text ends too early, or an argument is not a literal.
        """
        self._expect("(")
        self.json.append("{")
        while not self._found(")"):
            if self._found("**"):
                self._dictionary(1, self._names)
            else:
                name = self._match(PARAMETER_NAME)
                self._key(json.dumps(name, ensure_ascii=False), "=", self._names)
                self._value(1)
            if not self._found(","):
                self._expect(")")
                break
        self.json.append("}")

    def add_open_string(self) -> None:
        """Write the string in which the text ends, if there is one, without its closing quote."""
        self._skip_space()
        if (found := _OPEN_STRING.fullmatch(self._text, self.at)) and len(found[0]) > 1:
            if self.json[-1] not in ("{", "[", ", ", ": "):
                return
            body = found[0][1:]
            for end in range(len(body), max(-1, len(body) - 12), -1):
                if (value := _string_value(found[0][0] + body[:end] + found[0][0])) is not None:
                    self.json.append(_json_string(value)[:-1])
                    return

    def _value(self, depth: int) -> None:
        """Read one literal."""
        if depth > MAX_DEPTH:
            raise _SyntaxError
        self._skip_space()
        char = self._text[self.at : self.at + 1]
        if char in ("[", "("):
            self._sequence(char, depth)
        elif char == "{":
            self.json.append("{")
            self._dictionary(depth, set())
            self.json.append("}")
        elif _STRING.match(self._text, self.at):
            self.json.append(_json_string(self._string()))
        else:
            self.json.append(_json_word(self._match(_WORD)))

    def _sequence(self, opener: str, depth: int) -> None:
        """Read a list or a tuple. One value in parentheses without a comma is this value itself."""
        self.at += 1
        start, count, commas = len(self.json), 0, 0
        closer = "]" if opener == "[" else ")"
        self.json.append("[")
        while not self._found(closer):
            if count:
                self.json.append(", ")
            self._value(depth + 1)
            count += 1
            if not self._found(","):
                self._expect(closer)
                break
            commas += 1
        if opener == "(" and count == 1 and not commas:
            del self.json[start]
        else:
            self.json.append("]")

    def _dictionary(self, depth: int, names: set[str]) -> None:
        """Read a dictionary. Write its items without the braces, because they may extend other arguments."""
        self._expect("{")
        while not self._found("}"):
            self._skip_space()
            if _STRING.match(self._text, self.at):
                self._key(_json_string(self._string()), ":", names)
            else:
                self._key(f'"{_json_word(self._match(_WORD))}"', ":", names)
            self._value(depth + 1)
            if not self._found(","):
                self._expect("}")
                break

    def _key(self, key: str, sign: str, names: set[str]) -> None:
        if key in names:
            raise _SyntaxError
        self._expect(sign)
        if names:
            self.json.append(", ")
        names.add(key)
        self.json += [key, ": "]

    def _string(self) -> str:
        """Read a string. Adjacent strings are one string, as in Python."""
        parts: list[str] = []
        while found := _STRING.match(self._text, self.at):
            if (value := _string_value(found[0])) is None:
                raise _SyntaxError
            parts.append(value)
            self.at = found.end()
            self._skip_space()
        return "".join(parts)

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._skip_space()
        if (found := pattern.match(self._text, self.at)) is None:
            raise _SyntaxError
        self.at = found.end()
        return found[0]

    def _found(self, token: str) -> bool:
        self._skip_space()
        found = self._text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found

    def _expect(self, token: str) -> None:
        if not self._found(token):
            raise _SyntaxError

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self.at)
        assert found is not None
        self.at = found.end()


def _string_value(source: str) -> str | None:
    """Return the value of a string in JSON or in Python syntax. JSON is tried first."""
    try:
        if source[0] == '"':
            return str(json.loads(source, strict=False))
    except ValueError:
        pass
    try:
        return str(ast.literal_eval(source))
    except (ValueError, SyntaxError, MemoryError):
        return None


def _json_string(value: str) -> str:
    # A lone surrogate cannot be sent as UTF-8, so it stays an escape.
    return _SURROGATE.sub(lambda one: f"\\u{ord(one[0]):04x}", json.dumps(value, ensure_ascii=False))


def _json_word(source: str) -> str:
    """Return a number or a word such as True as JSON text. Numbers in JSON syntax stay as they are."""
    if source in _WORDS:
        return _WORDS[source]
    if _JSON_NUMBER.fullmatch(source):
        return source
    try:
        value = ast.literal_eval(source)
        if type(value) in (int, float):
            return json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, MemoryError):
        pass
    raise _SyntaxError
