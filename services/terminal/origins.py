"""Colours text by the origin of its tokens: drafted, chosen by the target after a draft, or plain."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.text import Text

DRAFT_STYLES = tuple(
    f"color({number})" for number in (66, 72, 36, 42, 43, 37, 31, 32, 33, 39, 69, 63, 99, 98, 97, 133)
)
"""Styles of drafted tokens by depth, from 1 on. Deeper tokens have the last style."""
BONUS_STYLE = "color(172)"
PLAIN_STYLE = ""


@dataclass(slots=True)
class _Token:
    """The style of a token's text, and the number of characters of this text that were not shown yet."""

    style: str
    left: int


class OriginColours:
    """Chooses the style of each piece of one answer's text, by the origin of the tokens.

    The text of a token can arrive later than the token. For example, the text may be the start of a stop
    string. A queue therefore stores the tokens whose text has not arrived.
    """

    def __init__(self) -> None:
        self._tokens: deque[_Token] = deque()

    def pieces(self, text: str, trace: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
        """Yield (piece, style) for the text of one event. `trace` is the round of the event, or None."""
        if trace is not None:
            self._tokens.extend(
                _Token(style_of(trace, position), len(own))
                for position, own in enumerate(trace["emitted_text"])
                if own
            )
        elif text:
            self._tokens.append(_Token(PLAIN_STYLE, len(text)))
        while text:
            head = self._tokens[0] if self._tokens else _Token(PLAIN_STYLE, len(text))
            size = min(head.left, len(text))
            yield text[:size], head.style
            text = text[size:]
            head.left -= size
            if not head.left and self._tokens:
                self._tokens.popleft()


def colour_legend() -> Text:
    """Return one line that explains the colours."""
    depths = [(f" {depth}", style) for depth, style in enumerate(DRAFT_STYLES, 1)]
    return Text.assemble(
        ("Drafted at depth", "dim"), *depths, "  ", ("after a draft", BONUS_STYLE), "  plain"
    )


def style_of(trace: dict[str, Any], position: int) -> str:
    """Return the style of the token at this position of a round's emitted tokens."""
    if len(trace["nodes"]) < 2:
        return PLAIN_STYLE
    if position < len(trace["accepted"]):
        return DRAFT_STYLES[min(position, len(DRAFT_STYLES) - 1)]
    return BONUS_STYLE
