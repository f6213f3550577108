"""The base class of parsers that read the text of an answer state by state."""

from __future__ import annotations

from abc import ABC, abstractmethod

from outrider.services.gateway.parsers.markers import TextWriter
from outrider.services.gateway.parsers.pieces import CallWriter, Piece, Text, ToolOptions


class BufferedParser(ABC):
    """An `OutputParser` that buffers text until its current state can read it.

    White space around tool calls is dropped.
    """

    def __init__(self, options: ToolOptions) -> None:
        self._calls = CallWriter(options)
        self._writer = TextWriter()
        self._buffer = ""

    @property
    def in_reasoning(self) -> bool:
        return False

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        self._finish(pieces)
        self._buffer = ""
        if rest := self._writer.finish():
            pieces.append(Text(rest))
        return pieces

    @abstractmethod
    def _step(self, pieces: list[Piece]) -> bool:
        """Read the buffer up to the next change of state. Return False if the state needs more text."""

    @abstractmethod
    def _finish(self, pieces: list[Piece]) -> None:
        """Read the rest of the buffer, because the answer has ended."""

    def _add_text(self, text: str, pieces: list[Piece]) -> None:
        if final := self._writer.add(text):
            pieces.append(Text(final))
