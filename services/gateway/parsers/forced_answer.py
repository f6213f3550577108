"""Parses an answer that must call a tool. Even if the call is cut off, its format never becomes text."""

from __future__ import annotations

from outrider.services.gateway.parsers.pieces import (
    CallWriter,
    OutputParser,
    Piece,
    Text,
    ToolCallStart,
    ToolOptions,
)


class ForcedCallParser:
    """Passes an answer to the parser of the model's format, and drops the rest of a call that is cut off.

    If the request allows one tool only, an answer that ends before the tool's name becomes a call of this
    tool without arguments.
    """

    def __init__(self, options: ToolOptions, format_parser: OutputParser, *, may_reason: bool) -> None:
        """Create a parser.

        Args:
            options: The tools. `ToolOptions.forced` is not empty.
            format_parser: Parses the calls of the model.
            may_reason: Whether the text that `format_parser` reads may begin with reasoning.
        """
        self._options = options
        self._parser = format_parser
        self._only = next(iter(options.forced)) if len(options.forced) == 1 and not may_reason else None
        self._begun = self._called = self._has_text = False

    @property
    def in_reasoning(self) -> bool:
        return self._parser.in_reasoning

    def push(self, text: str) -> list[Piece]:
        self._begun |= bool(text)
        pieces = self._parser.push(text)
        self._called |= any(isinstance(piece, ToolCallStart) for piece in pieces)
        self._has_text |= any(isinstance(piece, Text) for piece in pieces)
        return pieces

    def finish(self) -> list[Piece]:
        pieces = self._parser.finish()
        if self._has_text:
            # The target has not enforced the call, so the client sees the whole text.
            return pieces
        pieces = [piece for piece in pieces if not isinstance(piece, Text)]
        called = self._called or any(isinstance(piece, ToolCallStart) for piece in pieces)
        if self._begun and self._only is not None and not called:
            pieces += CallWriter(self._options).start(self._only)
        return pieces
