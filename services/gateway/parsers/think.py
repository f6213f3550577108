"""Parses reasoning between two tags, such as ``<think>…</think>``, and the answer that follows."""

from __future__ import annotations

from outrider.services.gateway.parsers.markers import TextWriter, split_at_marker
from outrider.services.gateway.parsers.pieces import OutputParser, Piece, Reasoning

THINK = ("<think>", "</think>")
BRACKETS = ("[THINK]", "[/THINK]")


class ThinkParser:
    """Splits off the reasoning at the start of an answer. Another parser reads the text after the reasoning.

    The white space around the reasoning, and the line breaks before the text, are dropped.
    """

    def __init__(self, tags: tuple[str, str], inside: bool, answer: OutputParser) -> None:
        """Create a parser.

        Args:
            tags: The opening tag and the closing tag of the reasoning.
            inside: Whether the prompt ends with the opening tag. In this case, the text begins with
                reasoning.
            answer: Parses the text after the reasoning.
        """
        self._open, self._close = tags
        self._inside = inside
        self._answer = answer
        self._state = "start"
        self._buffer = ""
        self._writer = TextWriter()
        self._writer.call()

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning" or (self._state == "start" and self._inside)

    def push(self, text: str) -> list[Piece]:
        if self._state == "answer":
            return self._answer.push(text)
        self._buffer += text
        pieces: list[Piece] = []
        if self._state == "start" and not self._decide():
            return pieces
        if self._state == "reasoning":
            split = split_at_marker(self._buffer, (self._close,))
            self._buffer = split.rest
            self._reason(split.before, pieces)
            self._state = "reasoning" if split.marker is None else "gap"
        if self._state == "gap" and (rest := self._buffer.lstrip("\n")):
            self._state, self._buffer = "answer", rest
        if self._state == "answer":
            rest, self._buffer = self._buffer, ""
            pieces += self._answer.push(rest)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self.in_reasoning:
            self._reason(self._buffer, pieces)
        elif self._state == "start":
            pieces += self._answer.push(self._buffer)
        self._buffer = ""
        return [*pieces, *self._answer.finish()]

    def _decide(self) -> bool:
        """Leave the state `start` once the buffer shows whether the text begins with reasoning."""
        start = self._buffer.lstrip()
        if start.startswith(self._open):
            self._state, self._buffer = "reasoning", start[len(self._open) :]
        elif not self._open.startswith(start):
            self._state = "reasoning" if self._inside else "answer"
        return self._state != "start"

    def _reason(self, text: str, pieces: list[Piece]) -> None:
        if final := self._writer.add(text):
            pieces.append(Reasoning(final))
