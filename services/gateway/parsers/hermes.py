"""Parses tool calls of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from outrider.services.gateway.parsers.json_call import JsonCall
from outrider.services.gateway.parsers.markers import TextWriter, split_at_marker
from outrider.services.gateway.parsers.pieces import CallWriter, Piece, Text, ToolOptions

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Parses calls in tags. A tag that no valid call follows is passed on as text."""

    in_reasoning = False

    def __init__(self, options: ToolOptions) -> None:
        self._calls = CallWriter(options)
        self._writer = TextWriter()
        self._buffer = ""
        self._call: JsonCall | None = None
        self._closing = False

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._call is not None:
            if self._call.name is None:
                self._add_text(OPEN + self._call.raw, pieces)
        elif not self._closing:
            self._add_text(self._buffer, pieces)
        self._call, self._buffer = None, ""
        if rest := self._writer.finish():
            pieces.append(Text(rest))
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Read the buffer up to the next change of state. Return False if the state needs more text."""
        if self._call is not None:
            return self._step_call(self._call, pieces)
        split = split_at_marker(self._buffer, (OPEN, CLOSE) if self._closing else (OPEN,))
        self._buffer = split.rest
        # Drop the text between the object and its closing tag.
        if not self._closing:
            self._add_text(split.before, pieces)
        if split.marker is None:
            return False
        self._closing = False
        if split.marker == OPEN:
            self._call = JsonCall()
        return True

    def _step_call(self, call: JsonCall, pieces: list[Piece]) -> bool:
        if not self._buffer:
            return False
        begun = call.name is not None
        arguments, self._buffer = call.push(self._buffer)
        if call.name is not None and not begun:
            self._writer.call()
            pieces += self._calls.start(call.name)
        pieces += self._calls.arguments(arguments) if call.name is not None else []
        if call.done or call.failed:
            self._call = None
            if call.name is None:
                self._add_text(OPEN + call.raw, pieces)
            else:
                pieces += self._calls.end()
                self._closing = True
        return True

    def _add_text(self, text: str, pieces: list[Piece]) -> None:
        if final := self._writer.add(text):
            pieces.append(Text(final))
