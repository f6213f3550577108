"""Parses Mistral's tool calls: ``[TOOL_CALLS]``, followed by a JSON list of calls or by ``name[ARGS]{…}``."""

from __future__ import annotations

import re

from outrider.services.gateway.parsers.buffered import BufferedParser
from outrider.services.gateway.parsers.json_call import JsonCall, JsonValue
from outrider.services.gateway.parsers.markers import split_at_marker
from outrider.services.gateway.parsers.pieces import Piece, ToolOptions

MARKER = "[TOOL_CALLS]"
# Mistral's chat templates refuse other ids.
ID_CHARS = 9
_NAME = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\][\w\-]*)?(?:\[ARGS\])?\s*(?=\{)", re.ASCII)
MAX_HEAD_CHARS = 512


class MistralParser(BufferedParser):
    """Parses the calls after the marker. The text before the marker is the answer's text."""

    def __init__(self, options: ToolOptions) -> None:
        super().__init__(options)
        # One of "text", "head" (after the marker), "item" (in a list, before a call), "object" (inside a call
        # of a list), "arguments" (after a name), or "after" (after a call of a list).
        self._state = "text"
        self._call = JsonCall()
        self._value = JsonValue()
        self._begun = False

    def _finish(self, pieces: list[Piece]) -> None:
        if self._state in ("text", "head"):
            self._add_text(self._buffer, pieces)
        elif self._state == "object" and not self._begun:
            self._add_text(self._call.raw, pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        match self._state:
            case "text":
                split = split_at_marker(self._buffer, (MARKER,))
                self._add_text(split.before, pieces)
                self._buffer = split.rest
                if split.marker:
                    self._state = "head"
                return split.marker is not None
            case "head":
                return self._head(pieces)
            case "item":
                return self._item()
            case "object":
                return self._object(pieces)
            case "arguments":
                return self._arguments(pieces)
            case _:
                rest = self._buffer.lstrip()
                self._buffer = rest[1:] if rest[:1] in (",", "]") else rest
                if rest:
                    self._state = "item" if rest[0] == "," else "text"
                return bool(rest)

    def _head(self, pieces: list[Piece]) -> bool:
        text = self._buffer.lstrip()
        if text[:1] in ("[", "{"):
            self._buffer, self._state = text.removeprefix("["), "item"
            return bool(self._buffer)
        name = _NAME.match(text)
        if name is not None:
            self._buffer, self._state = text[name.end() :], "arguments"
            self._value = JsonValue()
            self._writer.call()
            pieces += self._calls.start(name[1])
            return True
        if "{" not in text and len(text) < MAX_HEAD_CHARS:
            return False
        self._state = "text"
        return True

    def _item(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith("{"):
            self._call, self._begun, self._state = JsonCall(), False, "object"
        elif self._buffer:
            self._state = "after" if self._buffer[0] == "]" else "text"
        return bool(self._buffer)

    def _object(self, pieces: list[Piece]) -> bool:
        call = self._call
        arguments, self._buffer = call.push(self._buffer)
        if call.name is not None and not self._begun:
            self._begun = True
            self._writer.call()
            pieces += self._calls.start(call.name)
        if self._begun:
            pieces += self._calls.arguments(arguments)
        if call.done or call.failed:
            if self._begun:
                pieces += self._calls.end()
            else:
                self._add_text(call.raw, pieces)
            self._state = "after"
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        arguments, self._buffer = self._value.take(self._buffer)
        pieces += self._calls.arguments(arguments)
        if self._value.done:
            self._state = "text"
        return self._value.done
