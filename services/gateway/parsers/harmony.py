"""Parses gpt-oss's harmony format: messages with a channel, and with a recipient if they are tool calls."""

from __future__ import annotations

import re

from outrider.services.gateway.parsers.buffered import BufferedParser
from outrider.services.gateway.parsers.json_call import JsonValue
from outrider.services.gateway.parsers.markers import split_at_marker
from outrider.services.gateway.parsers.pieces import Piece, Reasoning, Text, ToolOptions

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
FUNCTIONS = "functions."
# If no message begins within this many characters, the answer does not use the format.
MAX_HEADER_CHARS = 1024


class HarmonyParser(BufferedParser):
    """Parses one answer of a gpt-oss model in the harmony format. Such an answer consists of messages.

    The prompt ends with the role of the first message, so the answer begins with the rest of this message's
    header. Messages in the channel ``analysis`` are reasoning. A message to ``functions.NAME`` is a tool
    call. All other messages are text.
    """

    def __init__(self, options: ToolOptions) -> None:
        super().__init__(options)
        # One of "header", "body", or "between" (after the end of a message).
        self._state = "header"
        self._kind: type[Text] | type[Reasoning] | None = None
        # The arguments of the current call. None if they have ended, or are no JSON object.
        self._value: JsonValue | None = None

    @property
    def in_reasoning(self) -> bool:
        return self._kind is Reasoning

    def _finish(self, pieces: list[Piece]) -> None:
        if self._state == "body":
            self._add(self._buffer, pieces)
            # A forced call always has arguments, so the answer was cut off before them.
            if not self._calls.options.forced:
                self._end(pieces)
        elif self._state == "header" and not _CHANNEL.search(self._buffer):
            self._kind = Text
            self._add(self._buffer, pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        if self._state == "body":
            if self._value is not None and not self._arguments(self._value, pieces):
                return False
            split = split_at_marker(self._buffer, (*ENDS, START))
            self._add(split.before, pieces)
            self._buffer = split.rest
            if split.marker is None:
                return False
            self._end(pieces)
            self._state = "header" if split.marker == START else "between"
            return True
        if self._state == "between":
            split = split_at_marker(self._buffer, (START,))
            self._buffer = split.rest
            self._state = "header" if split.marker else "between"
            return split.marker is not None
        header, found, rest = self._buffer.partition(MESSAGE)
        if found:
            self._buffer = rest
            self._begin(header, pieces)
        elif len(self._buffer) > MAX_HEADER_CHARS:
            self._state, self._kind = "body", Text
        else:
            return False
        return True

    def _begin(self, header: str, pieces: list[Piece]) -> None:
        self._state = "body"
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1].startswith(FUNCTIONS):
            self._kind = None
            self._value = JsonValue()
            pieces += self._calls.start(recipient[1][len(FUNCTIONS) :])
        else:
            # Calls of the model's built-in tools are shown as reasoning.
            private = recipient is not None or (channel is not None and channel[1] == "analysis")
            self._kind = Reasoning if private else Text

    def _arguments(self, value: JsonValue, pieces: list[Piece]) -> bool:
        """Read the JSON object of a call. Markers in it are plain text. Return False if it is incomplete."""
        if not value.begun and (start := self._buffer.lstrip()):
            if not start.startswith("{"):
                self._value = None
                return True
        elif not value.begun:
            return False
        arguments, self._buffer = value.take(self._buffer)
        self._add(arguments, pieces)
        if value.done:
            self._value = None
        return value.done

    def _add(self, text: str, pieces: list[Piece]) -> None:
        if self._kind is None:
            pieces += self._calls.arguments(text)
        elif text:
            pieces.append(self._kind(text))

    def _end(self, pieces: list[Piece]) -> None:
        if self._kind is None:
            pieces += self._calls.end()
