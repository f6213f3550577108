"""Request body of ``POST /v1/chat/completions``: checks messages, content parts and template variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from outrider.services.gateway.parameters import check_prompt_text
from outrider.services.gateway.requested_rules import NO_REQUESTED_LOGPROBS, RequestedLogprobs, check_top
from outrider.services.gateway.schemas.common import Neutral, NeutralOnly, OpenAIRequest, StrictModel
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import LogprobParams

# Template variables that clients may set. Any other variable could insert text outside the client's messages.
TEMPLATE_OPTIONS = ("enable_thinking", "thinking", "reasoning_effort")


class TextPart(StrictModel):
    """A part of a message's content. Only text is supported.

    Parts of other types are parsed too, so that the error can name their type.
    """

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


class Message(NeutralOnly):
    """One message. Clients may send replies back unchanged, so empty fields of replies are accepted."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "tool_call_id": (),
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Any = None
    reasoning_content: str | None = None
    tool_calls: Neutral = None
    function_call: Neutral = None
    audio: Neutral = None
    tool_call_id: Neutral = None

    def for_template(self, field: str) -> dict[str, Any]:
        """Return the message in the form that chat templates expect.

        Raises:
            InvalidRequestError: If a part of the message is not supported. The error names the part.
        """
        self.refuse_unsupported(f"{field}.")
        if self.role in ("tool", "function"):
            raise InvalidRequestError(
                f"{field}.role: {self.role} messages are not supported yet.",
                field=f"{field}.role",
                reason="unsupported_parameter",
            )
        text = self._text(field)
        check_prompt_text(text, f"{field}.content")
        # Templates do not define the developer role, which is OpenAI's newer name of the system role.
        message = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.name is not None:
            check_prompt_text(self.name, f"{field}.name")
            message["name"] = self.name
        return message

    def _text(self, field: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            raise InvalidRequestError(f"{field}.content must be text.", field=f"{field}.content")
        for number, part in enumerate(self.content):
            where = f"{field}.content.{number}"
            if part.type != "text":
                message = f"{where}: only text parts are supported, not {part.type[:32]!r}."
                raise InvalidRequestError(message, field=where, reason="unsupported_parameter")
            for unknown in part.model_extra or ():
                raise InvalidRequestError(
                    f"Unknown field: {where}.{unknown}.", field=f"{where}.{unknown}", reason="unknown_field"
                )
            if part.text is None:
                raise InvalidRequestError(
                    f"Missing field: {where}.text.", field=f"{where}.text", reason="missing_field"
                )
        return "".join(part.text or "" for part in self.content)


class ChatRequest(OpenAIRequest):
    """The request body: OpenAI's fields, the supported fields of SGLang and vLLM, and `speculation`."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description=f"Allowed keys: {', '.join(TEMPLATE_OPTIONS)}."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    # The next fields have no effect without tools, reasoning parsers or predicted outputs.
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    prediction: Any = None
    verbosity: Any = None

    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None, description="Number of alternatives per token, 0 to 20. Requires logprobs: true."
    )
    tools: Neutral = None
    tool_choice: Neutral = None
    functions: Neutral = None
    function_call: Neutral = None
    modalities: Neutral = None
    audio: Neutral = None
    web_search_options: Neutral = None

    def wanted_logprobs(self) -> RequestedLogprobs:
        """Return the logprobs that the client wants.

        Raises:
            InvalidRequestError: If top_logprobs is out of range, or set without logprobs.
        """
        top = check_top(self.top_logprobs, "top_logprobs")
        if not self.logprobs:
            if top:
                raise InvalidRequestError("top_logprobs requires logprobs: true.", field="top_logprobs")
            return NO_REQUESTED_LOGPROBS
        return RequestedLogprobs(LogprobParams(top=top or 0), bool(self.return_tokens_as_token_ids))

    def token_limit(self) -> int | None:
        """Return the client's limit of new tokens, or None.

        The client may set `max_tokens` or `max_completion_tokens`.
        Raises:
            InvalidRequestError: If the two fields have different values.
        """
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ. Set only one of them.", field="max_tokens"
            )
        return self.max_completion_tokens

    def template_messages(self, max_messages: int) -> list[dict[str, Any]]:
        """Check the messages and return them in the form that chat templates expect.

        Raises:
            InvalidRequestError: If there are too many messages, or a part of one is not supported.
        """
        if len(self.messages) > max_messages:
            raise InvalidRequestError(
                f"messages must contain at most {max_messages} messages, not {len(self.messages)}.",
                field="messages",
            )
        return [message.for_template(f"messages.{number}") for number, message in enumerate(self.messages)]

    def template_options(self) -> Mapping[str, Any]:
        """Return the template variables that the client set.

        Raises:
            InvalidRequestError: If a key is not allowed, or a value is not a scalar.
        """
        options = dict(self.chat_template_kwargs or {})
        for key, value in options.items():
            field = f"chat_template_kwargs.{key}"
            if key not in TEMPLATE_OPTIONS:
                raise InvalidRequestError(
                    f"{field} is not allowed. Allowed keys: {', '.join(TEMPLATE_OPTIONS)}.", field=field
                )
            if not isinstance(value, (str, bool, int)) or (isinstance(value, str) and len(value) > 64):
                raise InvalidRequestError(
                    f"{field} must be a boolean, an integer or a string of at most 64 characters.",
                    field=field,
                )
            if isinstance(value, str):
                check_prompt_text(value, field)
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        return options
