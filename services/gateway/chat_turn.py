"""One turn of a chat: builds its prompt, and creates the parsers of its answers. All chat routes use it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.services.gateway.conversation_cuts import Messages, longest_that_fits
from outrider.services.gateway.core import GatewayCore, Job
from outrider.services.gateway.parameters import Parameters
from outrider.services.gateway.parsers.answer import AnswerReader, ParsedAnswer
from outrider.services.gateway.parsers.forced import CallFormat, calls_constraint
from outrider.services.gateway.parsers.pieces import Piece, ToolOptions
from outrider.services.gateway.render import check_not_aborted
from outrider.services.gateway.request import Chunk, Finished, Started
from outrider.services.gateway.tokenizer import ChatEnding, TextCodec
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError

# Number of tokens at the end of the prompt to search for an opening tag of the reasoning.
PROMPT_END_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The end of the only answer of a turn."""

    finished: Finished
    answer: ParsedAnswer


@dataclass(slots=True)
class ChatTurn:
    """A chat request that has passed all checks that are possible before tokenization.

    Attributes:
        core: The gateway core.
        codec: The model's text codec.
        parameters: Sampling parameters. They keep special tokens in the text if the output parsers need these
            tokens.
        messages: Messages for the chat template.
        options: Variables of the chat template, including the tools.
        ending: How the prompt ends.
        truncate: Number of tokens to keep from the end of the prompt. None keeps all tokens.
        drop_oldest: Whether to leave out the oldest messages if the conversation does not fit.
        tools: The tools that the answer may call. None if the request has no tools.
        split_reasoning: Whether the reply contains the reasoning apart from the text.
    """

    core: GatewayCore
    codec: TextCodec
    parameters: Parameters
    messages: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    ending: ChatEnding | None = None
    truncate: int | None = None
    drop_oldest: bool = False
    tools: ToolOptions | None = None
    split_reasoning: bool = True
    _prompt_end: str = ""

    @classmethod
    def create(
        cls,
        core: GatewayCore,
        parameters: Parameters,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        forced: Sequence[Mapping[str, Any]] = (),
        parallel: bool = True,
        options: Mapping[str, Any] | None = None,
        ending: ChatEnding | None = None,
        truncate: int | None = None,
        drop_oldest: bool = False,
        split_reasoning: bool = True,
    ) -> ChatTurn:
        """Create a turn from the checked parts of a chat request.

        Args:
            core: The gateway core.
            parameters: Sampling parameters of the request.
            messages: Messages for the chat template.
            tools: Tools for the chat template. Empty if the answer must not call tools.
            forced: The tools of which the answer must call one. Empty if the answer need not call a tool.
            parallel: Whether an answer may contain several tool calls.
            options: Variables of the chat template that the client set.
            ending: How the prompt ends. With None, it ends with the header of the assistant's answer.
            truncate: Number of tokens to keep from the end of the prompt. None keeps all tokens.
            drop_oldest: Whether to leave out the oldest messages if the conversation does not fit.
            split_reasoning: Whether the reply contains the reasoning apart from the text.

        Raises:
            InvalidRequestError: If the server runs without a tokenizer, or the model cannot call tools.
        """
        codec = core.need_codec("messages")
        if tools and core.parsers.tools == "none":
            raise InvalidRequestError(
                "tools: the calls of this model cannot be read, because its chat template has no known "
                "format of tool calls. If you know the format, start the gateway with --tool-call-parser.",
                field="tools",
                reason="unsupported_parameter",
            )
        # 1. Show the tools to the model. A forced call, or a form of the answer, becomes a constraint.
        variables = dict(options or {})
        allowed = None
        if tools:
            variables["tools"] = list(tools)
            allowed = ToolOptions(_names(tools), parallel, forced=_names(forced))
            calls = CallFormat(core.parsers.tools, codec.special_tokens, codec.template_source, parallel)
            asked = _of_calls(parameters.constraint, tools, forced, calls)
            parameters = replace(parameters, constraint=asked)
        # 2. The constraint begins after the reasoning.
        if parameters.constraint is not None:
            after, opening = core.parsers.markers(split_reasoning, calls=bool(tools))
            form = replace(parameters.constraint, begins_after=after, opening=opening)
            parameters = replace(parameters, constraint=form)
        # 3. Some parsers recognize calls and reasoning by special tokens, which the text then must contain.
        if core.parsers.needs_special_tokens(bool(tools)):
            parameters = replace(parameters, skip_special_tokens=False)
        return cls(
            core,
            codec,
            parameters,
            messages,
            variables,
            ending,
            truncate,
            drop_oldest,
            allowed,
            split_reasoning,
        )

    async def prompts(self) -> Sequence[tuple[int, ...]]:
        """Return the token ids of the prompt."""
        if self.drop_oldest:
            ids = await longest_that_fits(self.messages, self._encode, self._fits)
        else:
            ids = await self._encode(self.messages)
        if self.core.parsers.reasoning != "none":
            self._prompt_end = self.codec.decode(ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        return [ids]

    async def _encode(self, messages: Messages) -> tuple[int, ...]:
        ids = await self.codec.encode_chat_aside(messages, self.options, self.ending)
        return self.core.builder.truncate(ids, self.truncate, self.parameters, self.core.client.info)

    def _fits(self, ids: tuple[int, ...]) -> bool:
        return len(ids) + max(1, self.parameters.max_tokens or 1) <= self.core.client.info.max_model_len

    def reader(self) -> AnswerReader:
        """Return the reader of one answer. Call this after `prompts`."""
        return AnswerReader(self.core.parsers.create(self.tools, self.split_reasoning, self._prompt_end))

    async def run(self, job: Job) -> AsyncGenerator[Started | Piece | TurnEnd, None]:
        """Run a chat that has one answer, and yield the pieces of the answer as they arrive.

        If the request asks for logprobs, the pieces of the text contain their tokens.

        Raises:
            OutriderError: For the same reasons as `GatewayCore.generate`.
        """
        reader = AnswerReader(None)
        async with aclosing(self.core.generate(job)) as events:
            async for one in events:
                match one.event:
                    case Started() as start:
                        reader = self.reader()
                        yield start
                    case Chunk() as chunk:
                        for piece in self._pieces(reader, chunk):
                            yield piece
                    case Finished() as end:
                        check_not_aborted(end)
                        for piece in reader.finish():
                            yield piece
                        yield TurnEnd(end, reader.answer)

    def _pieces(self, reader: AnswerReader, chunk: Chunk) -> list[Piece]:
        if not chunk.logprobs:
            return reader.push(chunk.text, len(chunk.token_ids))
        tokens = list(zip(chunk.token_ids, chunk.logprobs, strict=False))
        return reader.push_scored(chunk.text, tokens, self.core.token_bytes)


def _names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    return frozenset(str(tool["function"]["name"]) for tool in tools)


def _of_calls(
    asked: Constraint | None,
    tools: Sequence[Mapping[str, Any]],
    forced: Sequence[Mapping[str, Any]],
    form: CallFormat,
) -> Constraint | None:
    """Return the constraint of an answer that may call tools, or None if the answer is unconstrained.

    Args:
        asked: The constraint that the client demands for an answer without tool calls. None if there is none.
        tools: The tools that the answer may call.
        forced: The tools from which the answer must call one. Empty if the answer need not call a tool.
        form: How the model writes tool calls.
    """
    if asked is None:
        return calls_constraint(forced, form) if forced else None
    if forced or asked.kind is not ConstraintKind.JSON_SCHEMA:
        reason = "a forced tool call" if forced else "tools, unless it is a JSON schema"
        raise InvalidRequestError(f"{asked.field} cannot be combined with {reason}.", field=asked.field)
    return calls_constraint(tools, form, asked)
