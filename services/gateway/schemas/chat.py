"""Request body of ``POST /v1/chat/completions``: checks messages, content parts and template variables."""

from __future__ import annotations

from typing import Any, ClassVar

from outrider.services.gateway.requested_rules import RequestedLogprobs, check_top
from outrider.services.gateway.schemas.base import Neutral
from outrider.services.gateway.schemas.common import OpenAIRequest
from outrider.services.gateway.schemas.json_values import JsonValues
from outrider.services.gateway.schemas.option_fields.openai import ChatFields
from outrider.services.gateway.schemas.state_fields import StateFields
from outrider.services.gateway.schemas.template_options import template_options
from outrider.services.gateway.schemas.tools import forced_tools, may_call, template_tools
from outrider.services.gateway.tokenizer import ChatEnding
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.base.logit_rules import LogprobParams


class ChatRequest(ChatFields, StateFields, OpenAIRequest):
    """The request body: OpenAI's fields, the supported fields of SGLang and vLLM, and `speculation`."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **OpenAIRequest.NEUTRAL,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
    }

    NO_EFFECT: ClassVar[frozenset[str]] = OpenAIRequest.NO_EFFECT | {"prediction", "verbosity"}

    prediction: Any = None
    verbosity: Any = None

    functions: Neutral = None
    function_call: Neutral = None
    modalities: Neutral = None
    audio: Neutral = None
    web_search_options: Neutral = None

    def wanted_logprobs(self) -> RequestedLogprobs:
        """Return the logprobs that the client wants.

        Raises:
            InvalidRequestError: If top_logprobs or prompt_logprobs is out of range, or top_logprobs is set
                without logprobs.
        """
        top, listed = check_top(self.top_logprobs, "top_logprobs"), self.prompt_list(self.prompt_logprobs)
        if top and not self.logprobs:
            raise InvalidRequestError("top_logprobs requires logprobs: true.", field="top_logprobs")
        wanted = LogprobParams(top or 0 if self.logprobs else None, listed)
        return RequestedLogprobs(wanted, bool(self.return_tokens_as_token_ids), prompt_list=listed)

    def template_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the answer may call, in the format that chat templates expect.

        Raises:
            InvalidRequestError: If a tool is invalid.
        """
        tools = template_tools(self.tools or [])
        return tools if may_call(self.tool_choice) else []

    def forced_tools(self) -> list[dict[str, Any]]:
        """Return the tools from which the answer must call one. Empty if the answer need not call a tool."""
        return forced_tools(self.tool_choice, self.template_tools())

    def ending(self) -> ChatEnding:
        """Return how the prompt ends.

        Raises:
            InvalidRequestError: If the prompt would both continue the last message and begin a new message.
        """
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise InvalidRequestError(
                "continue_final_message requires add_generation_prompt: false.",
                field="continue_final_message",
            )
        return ChatEnding(
            self.add_generation_prompt is not False,
            bool(self.continue_final_message),
            bool(self.add_special_tokens),
        )

    def template_messages(self, max_messages: int) -> list[dict[str, Any]]:
        """Check the messages and return them in the format that chat templates expect.

        Raises:
            InvalidRequestError: If there are too many messages, or a part of a message is not supported.
        """
        if len(self.messages) > max_messages:
            raise InvalidRequestError(
                f"messages must contain at most {max_messages} messages, not {len(self.messages)}.",
                field="messages",
            )
        values = JsonValues()
        return [
            message.for_template(f"messages.{number}", values) for number, message in enumerate(self.messages)
        ]

    def template_options(self) -> dict[str, Any]:
        """Return the variables of the chat template that the client set in the request.

        Raises:
            InvalidRequestError: If a key is not allowed, or a value is not a scalar.
        """
        options = template_options(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            options["reasoning_effort"] = self.reasoning_effort
        return options
