"""The tools of a chat request, and the choice of the tools that the answer may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.services.gateway.schemas.base import OpenModel
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.shared.base.errors import InvalidRequestError

MAX_TOOLS = 512
MAX_TOOL_NAME_CHARS = 128


class FunctionTool(OpenModel):
    """A function that the answer may call. `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(OpenModel):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(OpenModel):
    """The function of a `NamedTool`."""

    name: str


class NamedTool(OpenModel):
    """A `tool_choice` that names a function.

    The chat route expects the name inside `function`, and the responses route expects it in `name`.
    """

    type: str
    name: str | None = None
    function: NamedFunction | None = None


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def template_tools(tools: Sequence[Tool], field: str = "tools") -> list[dict[str, Any]]:
    """Return the tools in the format that chat templates expect.

    Raises:
        InvalidRequestError: If there are too many tools, or if a tool is nested too deeply or is not valid
            text.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{field} must contain at most {MAX_TOOLS} tools, not {len(tools)}.", field=field
        )
    shown = [
        {
            "type": "function",
            "function": {
                name: value
                for name in ("name", "description", "parameters")
                if (value := getattr(tool.function, name)) is not None
            },
        }
        for tool in tools
    ]
    JsonValues().check(shown, field)
    return shown


def may_call(choice: ToolChoice | None) -> bool:
    """Return whether the answer may call tools."""
    return choice != "none"


def forced_tools(
    choice: ToolChoice | None, tools: Sequence[dict[str, Any]], field: str = "tool_choice"
) -> list[dict[str, Any]]:
    """Return the tools of which the answer must call one. Empty if the answer need not call a tool.

    Args:
        choice: The client's `tool_choice`.
        tools: All tools of the request, from `template_tools`.
        field: Name of the `tool_choice` field, for errors.

    Raises:
        InvalidRequestError: If the choice names a tool that the request does not contain.
    """
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise InvalidRequestError(f"{field} requires tools.", field=field)
    if not isinstance(choice, NamedTool):
        return list(tools)
    name = choice.function.name if choice.function is not None else choice.name
    if choice.type not in ("function", "tool") or name is None:
        raise InvalidRequestError(
            f"{field} must be 'none', 'auto', 'required' or the name of a function.",
            field=field,
            reason="unsupported_parameter",
        )
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise InvalidRequestError(f"{field} names {name[:128]!r}, which is not in tools.", field=field)
    return named
