"""The tools of a chat request, and which of them the answer may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.services.gateway.parameters import check_prompt_text
from outrider.services.gateway.schemas.base import OpenModel
from outrider.shared.base.errors import InvalidRequestError

MAX_TOOLS = 512
MAX_TOOL_NAME_CHARS = 128
# Templates print JSON recursively.
MAX_JSON_DEPTH = 64


class FunctionTool(OpenModel):
    """A function that the answer may call. `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(OpenModel):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionTool


class NamedTool(OpenModel):
    """The `tool_choice` that names a function."""

    type: str


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def template_tools(tools: Sequence[Tool], field: str = "tools") -> list[dict[str, Any]]:
    """Return the tools in the form that chat templates expect.

    Raises:
        InvalidRequestError: If there are too many tools, or a tool is nested too deeply or is not valid text.
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
    check_json(shown, field)
    return shown


def check_choice(choice: ToolChoice | None, field: str = "tool_choice") -> bool:
    """Return whether the answer may call tools.

    Raises:
        InvalidRequestError: If the choice forces a call. A forced call requires structured output.
    """
    if choice == "required" or isinstance(choice, NamedTool):
        raise InvalidRequestError(
            f"{field}: forcing a tool call requires structured output, which is not supported yet. "
            "Use 'auto' or 'none'.",
            field=field,
            reason="unsupported_parameter",
        )
    return choice != "none"


def check_json(value: object, field: str) -> None:
    """Reject JSON that is nested too deeply, or contains lone surrogates."""
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for one in level
            if isinstance(one, (dict, list))
            for child in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            break
    else:
        raise InvalidRequestError(f"{field} is nested too deeply.", field=field)
    check_prompt_text(json.dumps(value, ensure_ascii=False), field)
