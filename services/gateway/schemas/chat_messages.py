"""The messages of a chat request: roles, content parts and tool calls, as chat templates expect them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from outrider.services.gateway.parameters import check_prompt_text
from outrider.services.gateway.schemas.base import Neutral, NeutralOnly, OpenModel, missing
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.shared.base.errors import InvalidRequestError

TEXT_PARTS = ("text", "input_text", "output_text")
# Placed between the text parts of one message. vLLM uses the same separator.
PART_SEPARATOR = "\n"


class TextPart(OpenModel):
    """A part of a chat message's content. Only text parts are supported.

    Parts of other types are parsed too, so that the error can name their type.
    """

    type: str
    text: str | None = None


class CalledFunction(OpenModel):
    """The function of a tool call. `arguments` is either JSON text or an object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(OpenModel):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: str | None = None
    index: int | None = None
    function: CalledFunction

    def for_template(self, field: str, values: JsonValues) -> dict[str, Any]:
        """Return the call in the format that chat templates expect.

        Args:
            field: The call's name, for errors.
            values: Checks the arguments of all calls in the request.

        Raises:
            InvalidRequestError: If the arguments are not a JSON object.
        """
        arguments: Any = self.function.arguments or {}
        where = f"{field}.function.arguments"
        if isinstance(arguments, str):
            try:
                arguments = values.read(arguments, where)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequestError(f"{where} must be a JSON object.", field=where)
        values.check(arguments, where)
        check_prompt_text(self.function.name + (self.id or ""), f"{field}.function.name")
        call: dict[str, Any] = (
            {"type": "function"} if self.id is None else {"id": self.id, "type": "function"}
        )
        return call | {"function": {"name": self.function.name, "arguments": arguments}}


class Message(NeutralOnly):
    """One message.

    A client may send a reply back unchanged, so fields that are empty in replies are accepted.
    """

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"function_call": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Neutral = None
    audio: Neutral = None

    def for_template(self, field: str, values: JsonValues | None = None) -> dict[str, Any]:
        """Return the message in the format that chat templates expect.

        Args:
            field: The message's name, for errors.
            values: Checks the arguments of all tool calls in the request. None checks only this message.

        Raises:
            InvalidRequestError: If a part of the message is not supported. The error names the part.
        """
        self.refuse_unsupported(f"{field}.")
        text = self._text(field)
        check_prompt_text(text, f"{field}.content")
        # Chat templates define neither the developer role (OpenAI's newer name of the system role) nor the
        # function role (the older name of the tool role).
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": text}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                check_prompt_text(value, f"{field}.{name}")
                message[name] = value
        if self.role == "assistant":
            self._add_answer(message, field, values or JsonValues())
        return message

    def _add_answer(self, message: dict[str, Any], field: str, values: JsonValues) -> None:
        """Add the reasoning and the tool calls of an earlier answer to `message`."""
        if reasoning := self.reasoning_content or self.reasoning:
            check_prompt_text(reasoning, f"{field}.reasoning_content")
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                call.for_template(f"{field}.tool_calls.{number}", values)
                for number, call in enumerate(self.tool_calls)
            ]
            if reasoning and not message["content"]:
                # gpt-oss's template reads the reasoning from this field, and refuses it beside content.
                message["thinking"] = reasoning

    def _text(self, field: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant":
                return self.refusal or ""
            raise InvalidRequestError(f"{field}.content must be text.", field=f"{field}.content")
        for number, part in enumerate(self.content):
            where = f"{field}.content.{number}"
            if part.type not in TEXT_PARTS:
                message = f"{where}: only text parts are supported, not {part.type[:32]!r}."
                raise InvalidRequestError(message, field=where, reason="unsupported_parameter")
            if part.text is None:
                raise missing(f"{where}.text")
        return PART_SEPARATOR.join(part.text or "" for part in self.content)
