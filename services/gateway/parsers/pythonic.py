"""Parses tool calls of Llama 3.2 and Llama 4 in Python syntax: ``[f(city="Paris"), g(x=1)]``."""

from __future__ import annotations

from outrider.services.gateway.parsers.buffered import BufferedParser
from outrider.services.gateway.parsers.markers import split_at_marker
from outrider.services.gateway.parsers.pieces import Piece, ToolOptions
from outrider.services.gateway.parsers.python_literal import arguments_json, partial_arguments_json

OPENERS = ("<|python_tag|>", "<|python_start|>")
CLOSER = "<|python_end|>"
MAX_NAME_CHARS = 256
# A longer call is not parsed, because a call is held in memory until it is complete.
MAX_CALL_CHARS = 1024 * 1024


class PythonicParser(BufferedParser):
    """Parses tool calls that a model writes as a Python list of calls at the start of the answer.

    An answer without such a list is text. The arguments of a call become one piece of JSON as soon as the
    call is complete.
    """

    def __init__(self, options: ToolOptions) -> None:
        super().__init__(options)
        self._options = options
        # One of "start", "call" (after a bracket or a comma), "next" (after a call), or "text".
        self._state = "start"
        # Text of the current list that is not part of a parsed call.
        self._lead = ""
        self._scanned = 0
        self._depth = 0
        self._quote = ""

    def _finish(self, pieces: list[Piece]) -> None:
        name, start = self._head() if self._state == "call" else (None, None)
        if name is not None:
            # The answer ends inside a call.
            self._writer.call()
            partial = partial_arguments_json(self._buffer[start:])
            pieces += [*self._calls.start(name), *self._calls.arguments(partial)]
        else:
            self._to_text(pieces)
            self._add_text(self._buffer, pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        match self._state:
            case "start":
                return self._start(pieces)
            case "call":
                return self._call(pieces)
            case "next":
                return self._next(pieces)
            case _:
                split = split_at_marker(self._buffer, (CLOSER,))
                self._add_text(split.before, pieces)
                self._buffer = split.rest
                return split.marker is not None

    def _start(self, pieces: list[Piece]) -> bool:
        text = self._buffer.lstrip()
        for opener in OPENERS:
            if text.startswith(opener):
                self._buffer = text[len(opener) :]
                return True
            if opener.startswith(text):
                return False
        if text.startswith("["):
            self._lead = self._buffer[: len(self._buffer) - len(text) + 1]
            self._buffer, self._state = text[1:], "call"
        else:
            self._to_text(pieces)
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        name, start = self._head()
        if name is None:
            if start is not None and len(self._buffer) < MAX_NAME_CHARS:
                return False
            self._to_text(pieces)
            return True
        assert start is not None
        end = self._end_of_call(start)
        if end is None and len(self._buffer) <= MAX_CALL_CHARS:
            return False
        arguments = None if end is None else arguments_json(self._buffer[start:end])
        if arguments is None:
            self._to_text(pieces)
            return True
        self._lead, self._buffer = "", self._buffer[end:]
        self._scanned = self._depth = 0
        self._writer.call()
        pieces += [*self._calls.start(name), *self._calls.arguments(arguments)]
        self._state = "next"
        return True

    def _head(self) -> tuple[str | None, int | None]:
        """Return the tool whose call begins the buffer, and the offset of the opening parenthesis.

        If the buffer may still become such a call, return None and 0. If it cannot, return None and None.
        """
        text = self._buffer.lstrip()
        undecided = False
        for name in self._options.names:
            if text.startswith(name):
                rest = text[len(name) :].lstrip()
                if rest.startswith("("):
                    return name, len(self._buffer) - len(rest)
                undecided |= not rest
            undecided |= name.startswith(text)
        return None, 0 if undecided else None

    def _next(self, pieces: list[Piece]) -> bool:
        text = self._buffer.lstrip()
        if not text:
            return False
        if text[0] == ",":
            self._buffer, self._state = text[1:], "call"
            return True
        if text[0] == "]":
            text = text[1:]
        self._buffer = text
        self._to_text(pieces)
        return True

    def _end_of_call(self, start: int) -> int | None:
        """Return the offset after the call's closing parenthesis, or None.

        Examine each character only once.
        """
        at = max(self._scanned, start)
        while at < len(self._buffer):
            char = self._buffer[at]
            if self._quote:
                if char == "\\":
                    if at + 1 == len(self._buffer):
                        break
                    at += 1
                elif char == self._quote:
                    self._quote = ""
            elif char in "\"'":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if not self._depth:
                    return at + 1
            at += 1
        self._scanned = at
        return None

    def _to_text(self, pieces: list[Piece]) -> None:
        """Treat all remaining text as text, including the part of the list that is not a call."""
        self._add_text(self._lead, pieces)
        self._state, self._lead = "text", ""
