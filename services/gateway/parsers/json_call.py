"""Reads a tool call that is a JSON object, such as ``{"name": "f", "arguments": {…}}``, while it arrives.

The reader returns the arguments exactly as the model wrote them. It does not wait for the end of the object.
"""

from __future__ import annotations

import json

ARGUMENT_KEYS = ("arguments", "parameters")
# If an object has no name within this many characters, it is not a tool call.
MAX_UNDECIDED_CHARS = 64 * 1024


class JsonValue:
    """Finds the end of one JSON value that is an object, an array or a string.

    Attributes:
        done: Whether the value is complete.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    @property
    def begun(self) -> bool:
        """Whether the first character of the value has been read."""
        return bool(self._depth) or self._in_string or self.done

    def take(self, text: str) -> tuple[str, str]:
        """Add text up to the end of the value. Return the added text, and the text after the value."""
        for at, char in enumerate(text):
            self.push(char)
            if self.done:
                return text[: at + 1], text[at + 1 :]
        return text, ""

    def push(self, char: str) -> None:
        """Add one character. `done` is True once the value is complete."""
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                self.done = not self._depth
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth <= 0


class JsonCall:
    """Reads one tool call that the model writes as a JSON object.

    In the object, the name and the arguments may be in any order.

    Attributes:
        name: The function's name, or None until the name has been read.
        done: Whether the object is complete.
        failed: Whether the text has turned out not to be a call.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._expect = "object"
        self._key = ""
        # Lists of characters, because appending to a long string takes time in proportion to the string.
        self._text: list[str] = []
        self._value: JsonValue | None = None
        self._early: list[str] = []
        self._has_arguments = False

    @property
    def raw(self) -> str:
        """All text that was read until the name became known."""
        return "".join(self._raw)

    def push(self, text: str) -> tuple[str, str]:
        """Read text of a tool call until the name becomes known, the object ends, or reading fails.

        Returns:
            Two texts. The first is the new part of the arguments, which is empty until the name is known. The
            second is the part of `text` that was not read.
        """
        new: list[str] = []
        for at, char in enumerate(text):
            named = self.name is not None
            if not named:
                self._raw.append(char)
            self._step(char, new)
            if self.name is not None and not named:
                new, self._early = self._early, []
                return "".join(new), text[at + 1 :]
            if self.done and not named:
                self.failed = True
            if self.done or self.failed:
                return "".join(new), text[at + 1 :]
        if self.name is None and len(self._raw) > MAX_UNDECIDED_CHARS:
            self.failed = True
        return "".join(new), ""

    def _step(self, char: str, new: list[str]) -> None:
        match self._expect:
            case "object" | "key" | "colon" | "next" if char.isspace():
                return
            case "object":
                self._advance(char == "{", "key")
            case "key":
                if char == "}":
                    self.done = True
                elif char == '"':
                    self._expect, self._text, self._value = "key text", [char], JsonValue()
                    self._value.push(char)
                else:
                    self.failed = True
            case "key text":
                assert self._value
                self._text.append(char)
                self._value.push(char)
                if self._value.done:
                    self._key, self._expect = _load_string(self._text), "colon"
            case "colon":
                self._advance(char == ":", "value")
                self._text, self._value = [], None
            case "value":
                self._step_value(char, new)
            case "next":
                self.done = char == "}"
                self._advance(char in ",}", "key")

    def _step_value(self, char: str, new: list[str]) -> None:
        if self._value is None:
            if char.isspace() and not self._text:
                return
            if not self._text and char in '{["':
                self._value = JsonValue()
            elif char in ",}":
                # The value was a number or a word such as null, and has now ended.
                self._end_value(new)
                self.done = char == "}"
                self._expect = "key"
                return
            else:
                self._text.append(char)
                return
        self._value.push(char)
        self._text.append(char)
        if self._key in ARGUMENT_KEYS and self._text[0] == "{":
            self._has_arguments = True
            if self.name is None:
                self._early.append(char)
            else:
                new.append(char)
            # The character has been passed on already. Later, only the first character of `_text` is needed.
            self._text = ["{"]
        if self._value.done:
            self._end_value(new)
            self._expect = "next"

    def _end_value(self, new: list[str]) -> None:
        if self._key == "name" and self.name is None:
            self.name = _load_string(self._text) or None
            self.failed = self.name is None
        elif self._key in ARGUMENT_KEYS and self._text[:1] == ['"'] and not self._has_arguments:
            # Some models write the arguments as a string that contains JSON.
            self._has_arguments = True
            text = _load_string(self._text)
            if self.name is None:
                self._early.append(text)
            else:
                new.append(text)

    def _advance(self, valid: bool, expect: str) -> None:
        self.failed = not valid
        self._expect = expect


def _load_string(chars: list[str]) -> str:
    try:
        value = json.loads("".join(chars))
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
