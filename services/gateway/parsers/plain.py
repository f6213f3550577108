"""The parser of answers without markup: everything is text."""

from __future__ import annotations

from outrider.services.gateway.parsers.pieces import Piece, Text


class PlainParser:
    """Passes on everything as text."""

    in_reasoning = False

    def push(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
