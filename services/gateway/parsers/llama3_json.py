"""Parses tool calls of Llama 3: one or more objects such as ``{"name": …, "parameters": {…}}``."""

from __future__ import annotations

from outrider.services.gateway.parsers.buffered import BufferedParser
from outrider.services.gateway.parsers.json_call import JsonCall
from outrider.services.gateway.parsers.markers import split_at_marker
from outrider.services.gateway.parsers.pieces import Piece, ToolOptions

PYTHON_TAG = "<|python_tag|>"
SEPARATORS = ";, \n\t\r"


class Llama3JsonParser(BufferedParser):
    """Parses the tool calls of Llama 3 models, which are JSON objects.

    The objects stand at the start of the answer, or after the special token ``<|python_tag|>``.

    An object whose name is not a tool of the request is treated as text, because an answer may consist of
    JSON.
    """

    def __init__(self, options: ToolOptions) -> None:
        super().__init__(options)
        self._options = options
        # "call" if an object (or text) may follow, or "text" if only text may follow.
        self._state = "call"
        # Text before a possible call. If no call follows, this text belongs to the answer.
        self._lead = ""
        self._call: JsonCall | None = None
        self._begun = False

    def _finish(self, pieces: list[Piece]) -> None:
        if self._call is not None and not self._begun:
            self._add_text(self._lead + self._call.raw, pieces)
        elif self._call is None:
            self._add_text((self._lead if not self._calls.count else "") + self._buffer, pieces)
        self._call, self._lead = None, ""

    def _step(self, pieces: list[Piece]) -> bool:
        if self._call is not None:
            return self._step_call(self._call, pieces)
        if self._state == "text":
            split = split_at_marker(self._buffer, (PYTHON_TAG,))
            self._add_text(split.before, pieces)
            self._buffer = split.rest
            if split.marker is None:
                return False
            self._state, self._lead = "call", ""
            return True
        rest = self._buffer.lstrip(SEPARATORS if self._calls.count else None)
        self._lead += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith(PYTHON_TAG):
            self._buffer, self._lead = rest[len(PYTHON_TAG) :], ""
        elif PYTHON_TAG.startswith(rest):
            return False
        elif rest.startswith("{"):
            self._call, self._begun = JsonCall(), False
        else:
            self._to_text("", pieces)
        return True

    def _step_call(self, call: JsonCall, pieces: list[Piece]) -> bool:
        arguments, self._buffer = call.push(self._buffer)
        if call.name is not None and not self._begun:
            if call.name not in self._options.names:
                self._call = None
                self._to_text(call.raw, pieces)
                return True
            self._begun, self._lead = True, ""
            self._writer.call()
            pieces += self._calls.start(call.name)
        if self._begun:
            pieces += self._calls.arguments(arguments)
        if call.done or call.failed:
            self._call = None
            if self._begun:
                pieces += self._calls.end()
            else:
                self._to_text(call.raw, pieces)
        return True

    def _to_text(self, text: str, pieces: list[Piece]) -> None:
        """Pass on `text`, which precedes the buffer, and read all later text as text."""
        self._add_text(self._lead + text, pieces)
        self._state, self._lead = "text", ""
