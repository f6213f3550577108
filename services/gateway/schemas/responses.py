"""Request body of ``POST /v1/responses``: converts input items to chat messages."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from outrider.services.gateway.requested_rules import NO_REQUESTED_LOGPROBS, RequestedLogprobs, check_top
from outrider.services.gateway.schemas.base import Neutral, OpenModel, given
from outrider.services.gateway.schemas.chat_messages import CalledFunction, Message, TextPart, ToolCall
from outrider.services.gateway.schemas.common import OpenAIRequest
from outrider.services.gateway.schemas.constraint_types import TextFormat, only_one
from outrider.services.gateway.schemas.field_types import ReasoningEffort
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.services.gateway.schemas.option_fields.openai import ResponseFields
from outrider.services.gateway.schemas.template_options import template_options
from outrider.services.gateway.schemas.tools import (
    FunctionTool,
    Tool,
    forced_tools,
    may_call,
    template_tools,
)
from outrider.shared.base.constraint import Constraint
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import LogprobParams

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for the logprobs of the text."""
ROLES = ("system", "developer", "user", "assistant")


class ResponseTool(OpenModel):
    """One entry of `tools`. Only functions are supported."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ReasoningOptions(OpenModel):
    """The `reasoning` object. `effort` reaches the chat template."""

    effort: ReasoningEffort | None = None


class TextOptions(OpenModel):
    """The `text` object. `format` restricts the form of the answer."""

    format: TextFormat | None = None
    verbosity: Any = None


class InputItem(OpenModel):
    """One item of `input`: a message, an earlier tool call, a tool call's output, or earlier reasoning."""

    type: str | None = None
    role: str | None = None
    content: str | list[TextPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[TextPart] | None = None
    id: Any = None
    status: Any = None
    phase: Any = None
    summary: list[TextPart] | None = None
    encrypted_content: Any = None

    def message(self, field: str) -> Message:
        """Return the input item as a message. Tool calls and reasoning become messages without text.

        Raises:
            InvalidRequestError: If the item's type is not supported, or a field is missing.
        """
        match self.type:
            case None | "message" if self.role in ROLES:
                return Message(role=self.role, content=self.content)  # type: ignore[arg-type]
            case None | "message":
                raise InvalidRequestError(
                    f"{field}.role must be one of {', '.join(ROLES)}.", field=f"{field}.role"
                )
            case "function_call":
                function = CalledFunction(name=given(self.name, field, "name"), arguments=self.arguments)
                return Message(role="assistant", tool_calls=[ToolCall(id=self.call_id, function=function)])
            case "function_call_output":
                return Message(
                    role="tool",
                    content=given(self.output, field, "output"),
                    tool_call_id=given(self.call_id, field, "call_id"),
                )
            case "reasoning":
                parts = self.content if isinstance(self.content, list) else []
                text = "".join(part.text or "" for part in [*(self.summary or []), *parts])
                return Message(role="assistant", reasoning_content=text)
            case other:
                raise InvalidRequestError(
                    f"{field}: items of type {other[:32]!r} are not supported.",
                    field=field,
                    reason="unsupported_parameter",
                )


class ResponsesRequest(ResponseFields, OpenAIRequest):
    """The request body. The server stores nothing, so `previous_response_id` is refused."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "previous_response_id": (),
        "conversation": (),
        "background": (),
        "prompt": (),
    }
    NO_EFFECT: ClassVar[frozenset[str]] = OpenAIRequest.NO_EFFECT | {"truncation"}

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[ResponseTool] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = Field(
        None, description=f"Additional data of the response. Only {LOGPROBS!r} has an effect."
    )
    truncation: Any = None

    previous_response_id: Neutral = None
    conversation: Neutral = None
    background: Neutral = None
    prompt: Neutral = None

    def constraint(self, prefix: str = "") -> Constraint | None:
        """Return the constraint that `text.format` or a field of another API demands, or None."""
        given = self.text.format if self.text is not None else None
        asked = None if given is None else given.constraint("text.format")
        return only_one(super().constraint(prefix), asked)

    def wanted_logprobs(self) -> RequestedLogprobs:
        """Return the logprobs that the client wants.

        Raises:
            InvalidRequestError: If `top_logprobs` is out of range, or is set although `include` does not ask
                for logprobs.
        """
        top = check_top(self.top_logprobs, "top_logprobs") or 0
        if LOGPROBS in (self.include or ()):
            return RequestedLogprobs(LogprobParams(top), bool(self.return_tokens_as_token_ids))
        if top:
            raise InvalidRequestError(f"top_logprobs requires {LOGPROBS!r} in include.", field="top_logprobs")
        return NO_REQUESTED_LOGPROBS

    def token_limit(self) -> int | None:
        """Return the client's limit of new tokens, or None."""
        return self.max_tokens if self.max_output_tokens is None else self.max_output_tokens

    def template_messages(self, max_messages: int) -> list[dict[str, Any]]:
        """Check the input items and return them as messages in the format that chat templates expect.

        Consecutive items of one answer (reasoning, text, tool calls) become one message.

        Raises:
            InvalidRequestError: If there are too many items, or an item is not supported.
        """
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if not 1 <= len(items) <= max_messages:
            raise InvalidRequestError(
                f"input must contain 1 to {max_messages} items, not {len(items)}.", field="input"
            )
        messages: list[dict[str, Any]] = []
        values = JsonValues()
        if self.instructions is not None:
            messages.append(Message(role="system", content=self.instructions).for_template("instructions"))
        for number, item in enumerate(items):
            field = f"input.{number}"
            message = _for_template(item.message(field), field, values)
            last = messages[-1] if messages else {}
            if message["role"] == last.get("role") == "assistant":
                _join(last, message)
            else:
                messages.append(message)
        return messages

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the answer may call, in the format that chat templates expect.

        Raises:
            InvalidRequestError: If a tool is not a function or is invalid.
        """
        tools = []
        for number, tool in enumerate(self.tools or []):
            if tool.type != "function" or not tool.name:
                raise InvalidRequestError(
                    f"tools.{number} must be a function with a name. Built-in tools are not supported.",
                    field=f"tools.{number}",
                    reason="unsupported_parameter",
                )
            function = FunctionTool.model_construct(
                name=tool.name, description=tool.description, parameters=tool.parameters
            )
            tools.append(Tool.model_construct(type="function", function=function))
        shown = template_tools(tools)
        return shown if may_call(self.tool_choice) else []

    def forced_tools(self) -> list[dict[str, Any]]:
        """Return the tools from which the answer must call one. Empty if the answer need not call a tool."""
        return forced_tools(self.tool_choice, self.template_tools())

    def template_options(self) -> dict[str, Any]:
        """Return the template variables that the client set."""
        options = template_options(self.chat_template_kwargs)
        if self.reasoning is not None and self.reasoning.effort is not None:
            options["reasoning_effort"] = self.reasoning.effort
        return options


def _for_template(message: Message, field: str, values: JsonValues) -> dict[str, Any]:
    """Return a message for chat templates. Errors name the fields of the item."""
    try:
        return message.for_template(field, values)
    except InvalidRequestError as error:
        inner = f"{field}.tool_calls.0.function."
        name = (error.field or field).replace(inner, f"{field}.")
        raise InvalidRequestError(
            error.message.replace(inner, f"{field}."), field=name, reason=error.reason
        ) from None


def _join(answer: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the next part of an answer to its message."""
    answer["content"] += more["content"]
    for name in ("reasoning_content", "thinking"):
        if name in more:
            answer[name] = answer.get(name, "") + more[name]
    if "tool_calls" in more:
        answer["tool_calls"] = [*answer.get("tool_calls", []), *more["tool_calls"]]
