"""Parses the chunks of one answer, and collects the answer's text, reasoning and tool calls."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.services.gateway.parsers.pieces import (
    OutputParser,
    Piece,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
)
from outrider.shared.base.logit_rules import TokenLogprob


@dataclass(slots=True)
class CalledTool:
    """One complete tool call. `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """The parts of a model's answer that have been read so far: text, reasoning and tool calls.

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

    @property
    def ends_in_call(self) -> bool:
        """True if the answer breaks off inside the arguments of a tool call."""
        if not self.tool_calls or not self.tool_calls[-1].arguments:
            return False
        try:
            json.loads(self.tool_calls[-1].arguments)
        except (ValueError, RecursionError):
            return True
        return False

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
    """Splits one answer into text, reasoning and tool calls while the model generates it.

    For a model without an output parser, the reader returns the whole answer as text.

    Attributes:
        answer: The parts of the answer that have been read so far.
    """

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self.answer = ParsedAnswer()
        # Tokens whose text the parser has not returned yet, and the lengths of their texts.
        self._held: list[tuple[int, TokenLogprob, int]] = []

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

    def push_scored(
        self,
        text: str,
        tokens: Sequence[tuple[int, TokenLogprob]],
        bytes_of: Callable[[int], bytes],
    ) -> list[Piece]:
        """Add a chunk of the answer whose tokens have logprobs, and return the pieces that are now final.

        Each piece of text contains its tokens with their logprobs. The tokens of reasoning, of tool calls and
        of their markers are left out. Tokens without text, such as the end of the sequence, are also left
        out.

        Args:
            text: Text of the chunk.
            tokens: The tokens of the chunk with their logprobs.
            bytes_of: Function that returns the bytes of a token.
        """
        started = self._in_reasoning
        pieces: list[Piece] = []
        for (token, logprob), part in zip(tokens, _split(text, tokens, bytes_of), strict=True):
            before = self._in_reasoning
            found = self.push(part, 0)
            if before or self._in_reasoning or any(not isinstance(piece, Text) for piece in found):
                self._held.clear()
            if not before or any(isinstance(piece, Text) for piece in found):
                self._held.append((token, logprob, len(part)))
            pieces += self._with_tokens(found)
        if not tokens:
            pieces += self._with_tokens(self.push(text, 0))
        if started and self._in_reasoning and text:
            self.answer.reasoning_tokens += len(tokens)
        return pieces

    def finish(self) -> list[Piece]:
        """Return the remaining pieces. Call this once the sequence has ended."""
        return self._with_tokens(self._collect(self._parser.finish() if self._parser else []))

    @property
    def _in_reasoning(self) -> bool:
        return self._parser is not None and self._parser.in_reasoning

    def _with_tokens(self, pieces: list[Piece]) -> list[Piece]:
        """Give the held tokens to the first piece of text, without those whose text the parser dropped."""
        texts = [index for index, piece in enumerate(pieces) if isinstance(piece, Text)]
        if not texts or not self._held:
            return pieces
        room = sum(len(piece.text) for piece in pieces if isinstance(piece, Text))
        kept = len(self._held)
        while kept and (kept == len(self._held) or self._held[kept - 1][2] <= room):
            kept -= 1
            room -= self._held[kept][2]
        tokens = tuple((token, logprob) for token, logprob, _ in self._held[kept:])
        first = pieces[texts[0]]
        assert isinstance(first, Text)
        pieces[texts[0]] = replace(first, tokens=tokens)
        self._held.clear()
        return pieces

    def _collect(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            self.answer.add(piece)
        return pieces


def plain_reader() -> AnswerReader:
    """Return a reader for which everything is text."""
    return AnswerReader(None)


def _split(
    text: str, tokens: Sequence[tuple[int, TokenLogprob]], bytes_of: Callable[[int], bytes]
) -> list[str]:
    """Return the part of the text that each token completes. The last token gets the rest of the text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts, at = [], 0
    for token, _ in tokens:
        length = len(decoder.decode(bytes_of(token)))
        parts.append(text[at : at + length])
        at += length
    if parts:
        parts[-1] += text[at:]
    return parts
