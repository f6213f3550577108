"""Request body of Anthropic's ``POST /v1/messages``: converts content blocks to chat messages."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from outrider.services.gateway.options.values import of_bodies
from outrider.services.gateway.parameters import Parameters
from outrider.services.gateway.schemas.base import NeutralOnly, OpenModel, given
from outrider.services.gateway.schemas.chat_messages import (
    PART_SEPARATOR,
    CalledFunction,
    Message,
    TextPart,
    ToolCall,
)
from outrider.services.gateway.schemas.constraint_types import TextFormat
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.services.gateway.schemas.option_fields.messages import MessagesFields
from outrider.services.gateway.schemas.speculation_fields import requested_speculation
from outrider.services.gateway.schemas.tools import (
    FunctionTool,
    NamedTool,
    Tool,
    forced_tools,
    template_tools,
)
from outrider.services.gateway.tokenizer import ChatEnding
from outrider.shared.base.errors import InvalidRequestError


class Block(OpenModel):
    """A content block: text, a tool call, a tool result, or thinking. Other types are refused."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextPart] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: Any = None
    data: Any = None
    citations: Any = None
    caller: Any = None
    # Clients mark blocks for Anthropic's prompt cache. This server has no use for these marks.
    cache_control: Any = None


class AnthropicMessage(OpenModel):
    """One message of the user or the assistant."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    def messages(self, field: str) -> list[Message]:
        """Return the message as chat messages: first the tool results, then the text.

        Raises:
            InvalidRequestError: If a content block of the message is not supported, or lacks a field.
        """
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        texts: list[TextPart] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        results: list[Message] = []
        for number, block in enumerate(self.content):
            where = f"{field}.content.{number}"
            match block.type:
                case "text":
                    texts.append(TextPart(type="text", text=given(block.text, where, "text")))
                case "thinking":
                    thoughts.append(given(block.thinking, where, "thinking"))
                case "redacted_thinking":
                    continue
                case "tool_use":
                    function = CalledFunction(
                        name=given(block.name, where, "name"), arguments=block.input or {}
                    )
                    calls.append(ToolCall(id=block.id, function=function))
                case "tool_result":
                    call_id = given(block.tool_use_id, where, "tool_use_id")
                    results.append(Message(role="tool", content=block.content or "", tool_call_id=call_id))
                case other:
                    raise InvalidRequestError(
                        f"{where}: blocks of type {other[:32]!r} are not supported.",
                        field=where,
                        reason="unsupported_parameter",
                    )
        if not texts and not calls and results:
            return results
        answer = Message(
            role=self.role,
            content=list(texts),
            tool_calls=calls or None,
            reasoning_content="".join(thoughts) or None,
        )
        return [*results, answer]


class AnthropicTool(OpenModel):
    """One entry of `tools`. Only tools that the client itself executes are supported."""

    type: str | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    cache_control: Any = None


class AnthropicChoice(OpenModel):
    """The `tool_choice` object."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(OpenModel):
    """The `thinking` object. It reaches the chat template as `enable_thinking`."""

    type: str
    # No chat template uses this limit of thinking tokens. A warning for every request would not help clients.
    budget_tokens: Any = None
    display: Any = None


class OutputConfig(OpenModel):
    """The `output_config` object.

    `effort` reaches the chat template as `reasoning_effort`. `format` restricts the form of the answer.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: TextFormat | None = None


class CountTokensRequest(NeutralOnly):
    """Request body of ``/v1/messages/count_tokens``: everything that belongs to the prompt."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[TextPart] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    def template_messages(self, max_messages: int) -> list[dict[str, Any]]:
        """Check the messages and return them in the format that chat templates expect.

        Raises:
            InvalidRequestError: If there are too many messages, or a content block is not supported.
        """
        if len(self.messages) > max_messages:
            raise InvalidRequestError(
                f"messages must contain at most {max_messages} messages, not {len(self.messages)}.",
                field="messages",
            )
        shown, values = [], JsonValues()
        if self.system:
            shown.append(Message(role="system", content=self.system).for_template("system"))
        for number, message in enumerate(self.messages):
            field = f"messages.{number}"
            shown += [one.for_template(field, values) for one in message.messages(field)]
        begun = self._begun_answer()
        if begun == "":
            del shown[-1]
        elif begun is not None:
            shown[-1]["content"] = begun
        return shown

    def _begun_answer(self) -> str | None:
        """Return the text with which the answer begins, or None if the last message is not the assistant's.

        White space at the end is dropped, because it would split the next word into unusual tokens.
        """
        last = self.messages[-1]
        if last.role != "assistant":
            return None
        parts = last.content if isinstance(last.content, list) else [Block(type="text", text=last.content)]
        if any(part.type != "text" for part in parts):
            return None
        return PART_SEPARATOR.join(part.text or "" for part in parts).rstrip()

    def ending(self) -> ChatEnding | None:
        """Return how the prompt ends: within the last message, if this is a text of the assistant."""
        return ChatEnding(False, True) if self._begun_answer() else None

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the answer may call, in the format that chat templates expect.

        Raises:
            InvalidRequestError: If a tool is one that Anthropic's servers would execute.
        """
        tools = []
        for number, tool in enumerate(self.tools or []):
            if tool.type not in (None, "custom"):
                raise InvalidRequestError(
                    f"tools.{number}: tools of type {tool.type[:32]!r} are not supported.",
                    field=f"tools.{number}",
                    reason="unsupported_parameter",
                )
            function = FunctionTool.model_construct(
                name=tool.name, description=tool.description, parameters=tool.input_schema
            )
            tools.append(Tool.model_construct(type="function", function=function))
        shown = template_tools(tools)
        return [] if self.tool_choice is not None and self.tool_choice.type == "none" else shown

    def forced_tools(self) -> list[dict[str, Any]]:
        """Return the tools from which the answer must call one. Empty if the answer need not call a tool."""
        choice = self.tool_choice
        if choice is None or choice.type in ("auto", "none"):
            return []
        if choice.type == "any":
            return forced_tools("required", self.template_tools())
        named = NamedTool.model_construct(type="tool", name=choice.name, function=None)
        return forced_tools(named, self.template_tools())

    def template_options(self) -> dict[str, Any]:
        """Return the template variables for `thinking` and `output_config`."""
        options: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            enabled = self.thinking.type == "enabled"
            options |= {"enable_thinking": enabled, "thinking": enabled}
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        return options

    @property
    def parallel(self) -> bool:
        """Whether an answer may contain several tool calls."""
        return not (self.tool_choice and self.tool_choice.disable_parallel_tool_use)


class MessagesRequest(MessagesFields, CountTokensRequest):
    """The request body: Anthropic's fields, `seed` and `speculation`."""

    NO_EFFECT: ClassVar[frozenset[str]] = frozenset(["metadata", "service_tier", "cache_control"])

    metadata: Any = None
    service_tier: Any = None

    def parameters(self) -> Parameters:
        """Return the sampling, stopping and speculation parameters.

        Raises:
            InvalidRequestError: If an unsupported field is set.
        """
        self.refuse_unsupported()
        given = self.output_config.format if self.output_config is not None else None
        return Parameters.of(
            of_bodies(self),
            speculation=requested_speculation(self.speculation),
            constraint=given.constraint("output_config.format") if given is not None else None,
        )

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer contains its thinking."""
        return self.thinking is not None and self.thinking.type != "disabled"


def tool_input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object.

    If the text is not a JSON object, return an object with the text under the key ``INVALID_JSON``.
    """
    if not arguments:
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
