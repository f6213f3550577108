"""Parses the chunks of one answer, and collects the answer's text, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.services.gateway.parsers.pieces import (
    OutputParser,
    Piece,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)


@dataclass(slots=True)
class CalledTool:
    """One complete tool call. `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The parts of an answer that have been read so far.

    Attributes:
        texts: Pieces of the text, in order.
        reasonings: Pieces of the reasoning, in order.
        tool_calls: Tool calls, in order.
        reasoning_tokens: Number of tokens of the reasoning.
    """

    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[CalledTool] = field(default_factory=list)
    reasoning_tokens: int = 0

    @property
    def text(self) -> str:
        """The complete text."""
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        """The complete reasoning."""
        return "".join(self.reasonings)

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        match piece:
            case Text(text=text):
                self.texts.append(text)
            case Reasoning(text=text):
                self.reasonings.append(text)
            case ToolCallStart(id=call_id, name=name):
                self.tool_calls.append(CalledTool(call_id, name))
            case ToolCallArguments(text=text):
                self.tool_calls[-1].arguments += text


class AnswerReader:
    """Parses one answer piece by piece. Without a parser, the whole answer is text.

    Attributes:
        answer: The parts of the answer that have been read so far.
    """

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self.answer = Answer()

    def push(self, text: str, num_tokens: int) -> list[Piece]:
        """Add a chunk of `text`, which has `num_tokens` tokens, and return the pieces that are now final."""
        if self._parser is None:
            pieces: list[Piece] = [Text(text)] if text else []
        else:
            before = self._parser.in_reasoning
            pieces = self._parser.push(text) if text else []
            if before and self._parser.in_reasoning:
                self.answer.reasoning_tokens += num_tokens
        return self._collect(pieces)

    def finish(self) -> list[Piece]:
        """Return the remaining pieces. Call this once the sequence has ended."""
        return self._collect(self._parser.finish() if self._parser else [])

    def _collect(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            self.answer.add(piece)
        return pieces


def plain_reader() -> AnswerReader:
    """Return a reader for which everything is text."""
    return AnswerReader(None)
