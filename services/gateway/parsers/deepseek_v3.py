"""Parses tool calls of DeepSeek V3, R1 and V3.1. These models mark tool calls with special tokens."""

from __future__ import annotations

from outrider.services.gateway.parsers.buffered import BufferedParser
from outrider.services.gateway.parsers.json_call import JsonValue
from outrider.services.gateway.parsers.markers import split_at_marker
from outrider.services.gateway.parsers.pieces import Piece, ToolOptions

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```json\n"


class DeepSeekV3Parser(BufferedParser):
    """Parses the tool calls of DeepSeek models, in both of their formats.

    DeepSeek V3 and R1 write the word ``function``, a separator, the name of the tool, and the arguments in a
    fenced block. V3.1 writes the name, a separator and the arguments.
    """

    def __init__(self, options: ToolOptions) -> None:
        super().__init__(options)
        # One of "text", "list" (between calls), "kind" (before the separator), "name" (after the separator of
        # V3), "value" (before the arguments), "arguments", or "tail" (after the arguments).
        self._state = "text"
        self._value = JsonValue()

    def _finish(self, pieces: list[Piece]) -> None:
        if self._state == "text":
            self._add_text(self._buffer, pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        match self._state:
            case "text":
                return self._seek({CALLS_BEGIN: "list"}, pieces)
            case "list":
                return self._seek({CALL_BEGIN: "kind", CALLS_END: "text"}, None)
            case "tail":
                return self._seek({CALL_END: "list", CALL_BEGIN: "kind", CALLS_END: "text"}, None)
            case "kind":
                kind, found, rest = self._buffer.partition(SEPARATOR)
                return bool(found) and self._begin(kind.strip(), rest, pieces)
            case "name":
                name, found, rest = self._buffer.partition("\n")
                return bool(found) and self._begin(name.strip(), rest, pieces)
            case "value":
                return self._before_value(pieces)
            case _:
                return self._arguments(pieces)

    def _seek(self, states: dict[str, str], pieces: list[Piece] | None) -> bool:
        """Read up to a marker. Append the text before it to `pieces`. If `pieces` is None, drop the text."""
        split = split_at_marker(self._buffer, tuple(states))
        if pieces is not None:
            self._add_text(split.before, pieces)
        self._buffer = split.rest
        if split.marker is None:
            return False
        self._state = states[split.marker]
        self._writer.call()
        return True

    def _begin(self, name: str, rest: str, pieces: list[Piece]) -> bool:
        self._buffer = rest
        if self._state == "kind" and name == "function":
            self._state = "name"
            return True
        self._value = JsonValue()
        self._state = "value"
        pieces += self._calls.start(name)
        return True

    def _before_value(self, pieces: list[Piece]) -> bool:
        text = self._buffer.lstrip()
        if FENCE.startswith(text) or CALL_END.startswith(text):
            if text != CALL_END:
                return False
        elif text.startswith(FENCE):
            self._buffer = text[len(FENCE) :]
            return True
        self._buffer = text
        if text.startswith("{"):
            self._state = "arguments"
        else:
            pieces += self._calls.end()
            self._state = "tail"
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        arguments, self._buffer = self._value.take(self._buffer)
        pieces += self._calls.arguments(arguments)
        if self._value.done:
            self._state = "tail"
        return self._value.done
