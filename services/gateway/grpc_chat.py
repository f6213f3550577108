"""Reads the chats of gRPC requests: messages, tools, template variables, and the way the prompt ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from outrider.gateway.v1 import gateway_pb2
from outrider.services.gateway.core import GatewayCore
from outrider.services.gateway.schemas.chat_messages import Message
from outrider.services.gateway.schemas.field_types import ReasoningEffort
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.services.gateway.schemas.template_options import template_options
from outrider.services.gateway.schemas.tools import NamedTool, Tool, forced_tools, template_tools
from outrider.services.gateway.tokenizer import ChatEnding
from outrider.shared.base.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = get_args(ReasoningEffort)


def template_messages(messages: Sequence[gateway_pb2.Message]) -> list[dict[str, Any]]:
    """Return the messages in the format that chat templates expect.

    Raises:
        InvalidRequestError: If a message is invalid. The error names the message.
    """
    values = JsonValues()
    return [_message(message, f"messages.{number}", values) for number, message in enumerate(messages)]


def _message(message: gateway_pb2.Message, field: str, values: JsonValues) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{field}.role must be one of {', '.join(ROLES)}, not {message.role[:32]!r}.",
            field=f"{field}.role",
        )
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    given = {
        "role": message.role,
        "content": message.content,
        "name": message.name or None,
        "tool_call_id": message.tool_call_id or None,
        "reasoning_content": message.reasoning or None,
        "tool_calls": calls or None,
    }
    return Message.model_validate(given).for_template(field, values)


def callable_tools(tools: Sequence[gateway_pb2.Tool], choice: str) -> list[dict[str, Any]]:
    """Return the tools that the answer may call, in the format that chat templates expect.

    Args:
        tools: The tools of the request.
        choice: ``auto``, ``none``, ``required``, or the name of a tool. An empty string means ``auto``.

    Raises:
        InvalidRequestError: If a tool is invalid.
    """
    made, values = [], JsonValues()
    for number, tool in enumerate(tools):
        field = f"tools.{number}"
        try:
            text = tool.parameters
            parameters = values.read(text, f"{field}.parameters") if text else None
            function = {"name": tool.name, "description": tool.description or None, "parameters": parameters}
            made.append(Tool.model_validate({"type": "function", "function": function}))
        except (ValueError, RecursionError):
            # Pydantic's errors are ValueErrors, too.
            raise InvalidRequestError(
                f"{field} must have a name, and parameters must be a JSON object.", field=field
            ) from None
    shown = template_tools(made)
    return [] if choice == "none" else shown


def forced_calls(tools: Sequence[gateway_pb2.Tool], choice: str) -> list[dict[str, Any]]:
    """Return the tools of which the answer must call one. Empty if the answer need not call a tool.

    The arguments are the same as for `callable_tools`.

    Raises:
        InvalidRequestError: If a tool or the choice is invalid.
    """
    if choice in ("", "auto", "none"):
        return []
    named = NamedTool.model_construct(type="tool", name=choice, function=None)
    return forced_tools("required" if choice == "required" else named, callable_tools(tools, choice))


def template_variables(prompt: gateway_pb2.ChatPrompt) -> dict[str, Any]:
    """Return the variables of the chat template that the client set.

    Raises:
        InvalidRequestError: If a variable is not allowed, or the variables are not a JSON object.
    """
    given: Any = {}
    if prompt.template_kwargs:
        try:
            given = JsonValues().read(prompt.template_kwargs, "prompt.template_kwargs")
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, dict):
        raise InvalidRequestError(
            "prompt.template_kwargs must be a JSON object.", field="prompt.template_kwargs"
        )
    variables = template_options(given)
    if effort := prompt.reasoning_effort:
        if effort not in EFFORTS:
            raise InvalidRequestError(
                f"prompt.reasoning_effort must be one of {', '.join(EFFORTS)}, not {effort[:32]!r}.",
                field="prompt.reasoning_effort",
            )
        variables["reasoning_effort"] = effort
    return variables


def chat_ending(prompt: gateway_pb2.ChatPrompt) -> ChatEnding:
    """Return how the prompt ends.

    Raises:
        InvalidRequestError: If the prompt would both continue the last message and begin a new message.
    """
    begins_answer = prompt.add_generation_prompt if prompt.HasField("add_generation_prompt") else True
    if prompt.continue_final_message and begins_answer:
        raise InvalidRequestError(
            "prompt.continue_final_message requires add_generation_prompt = false.",
            field="prompt.continue_final_message",
        )
    return ChatEnding(begins_answer, prompt.continue_final_message, prompt.add_special_tokens)


async def encode_chat(core: GatewayCore, request: gateway_pb2.TokenizeRequest) -> tuple[int, ...]:
    """Return the token ids of the chat in a gRPC message TokenizeRequest.

    Raises:
        InvalidRequestError: If the message contains a text in addition to the chat, or the chat is invalid.
    """
    if request.text:
        raise InvalidRequestError("Set either text or messages.", field="text")
    if len(request.messages) > core.settings.max_messages:
        raise InvalidRequestError(
            f"messages must contain at most {core.settings.max_messages} messages.", field="messages"
        )
    messages = template_messages(request.messages)
    variables = template_variables(request.prompt)
    if tools := callable_tools(request.tools, "auto"):
        variables["tools"] = tools
    codec = core.need_codec("messages")
    return await codec.encode_chat_aside(messages, variables, chat_ending(request.prompt))
