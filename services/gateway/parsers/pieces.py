"""Defines the typed pieces into which an answer is parsed, and the interface of all parsers."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.shared.base.logit_rules import TokenLogprob

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text.

    Attributes:
        text: The text.
        tokens: The tokens of the text, each with its logprob. Empty if the client wants no logprobs.
    """

    text: str
    tokens: Sequence[tuple[int, TokenLogprob]] = ()


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The piece of an answer that starts a tool call.

    Attributes:
        index: Number of the call within its answer, counted from 0.
        id: Id of the call. The client sends this id back together with the call's result.
        name: Name of the function that is called.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of tool call `index`. The arguments are JSON text, as the model wrote them."""

    index: int
    text: str


Piece = Text | Reasoning | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Splits the text of one sequence into pieces. The pieces do not depend on the chunks of the text."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text pushed last belongs to the reasoning."""
        ...

    def push(self, text: str) -> list[Piece]:
        """Add `text`, and return the pieces that are now final."""
        ...

    def finish(self) -> list[Piece]:
        """Return the remaining pieces. Call this once the sequence has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools that the answer to a request may call, and the format of the calls in the reply.

    Attributes:
        names: Names of the request's tools.
        parallel: Whether an answer may contain several calls. If not, all calls after the first are dropped.
        id_chars: Length of a call's id, for models that require ids of a fixed length without a prefix. With
            None, ids have OpenAI's format.
        forced: Names of the tools of which the answer must call one. Empty if it need not call a tool.
    """

    names: frozenset[str] = frozenset()
    parallel: bool = True
    id_chars: int | None = None
    forced: frozenset[str] = frozenset()


@dataclass(slots=True)
class CallWriter:
    """Numbers the tool calls of one answer and makes their ids."""

    options: ToolOptions
    count: int = 0
    _dropping: bool = field(default=False)
    _has_arguments: bool = field(default=True)

    def start(self, name: str) -> list[Piece]:
        """Begin a call."""
        self._dropping = bool(self.count) and not self.options.parallel
        if self._dropping:
            return []
        self.count += 1
        self._has_arguments = False
        length = self.options.id_chars
        call_id = (
            f"call_{secrets.token_hex(12)}"
            if length is None
            else "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))
        )
        return [ToolCallStart(self.count - 1, call_id, name)]

    def arguments(self, text: str) -> list[Piece]:
        """Add to the arguments of the call that began last."""
        if self._dropping or not text:
            return []
        self._has_arguments = True
        return [ToolCallArguments(self.count - 1, text)]

    def end(self) -> list[Piece]:
        """End the call. If the model wrote no arguments, add an empty object."""
        return [] if self._has_arguments else self.arguments("{}")
