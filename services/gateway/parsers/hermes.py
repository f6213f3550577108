"""Parses tool calls of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from outrider.services.gateway.parsers.buffered import BufferedParser
from outrider.services.gateway.parsers.json_call import JsonCall
from outrider.services.gateway.parsers.markers import split_at_marker
from outrider.services.gateway.parsers.pieces import Piece, ToolOptions

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(BufferedParser):
    """Parses calls in tags. A tag that no valid call follows is passed on as text."""

    def __init__(self, options: ToolOptions) -> None:
        super().__init__(options)
        self._call: JsonCall | None = None
        self._closing = False

    def _finish(self, pieces: list[Piece]) -> None:
        if self._call is not None:
            if self._call.name is None:
                self._add_text(OPEN + self._call.raw, pieces)
        elif not self._closing:
            self._add_text(self._buffer, pieces)
        self._call = None

    def _step(self, pieces: list[Piece]) -> bool:
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
