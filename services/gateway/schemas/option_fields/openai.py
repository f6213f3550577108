"""Request fields of REST, written by `scripts/option_sources.py` from the table of options."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from outrider.services.gateway.schemas.chat_messages import Message
from outrider.services.gateway.schemas.constraint_types import JsonSchema, ResponseFormat, StructuredOutputs
from outrider.services.gateway.schemas.field_types import (
    ExpertsStart,
    ReasoningEffort,
    Salt,
    Salts,
    Truncation,
)
from outrider.services.gateway.schemas.option_fields.speculation import SpeculationOptions
from outrider.services.gateway.schemas.stream_options import StreamOptions
from outrider.services.gateway.schemas.tools import Tool, ToolChoice


class OpenAIFormFields(BaseModel):
    """Fields of OpenAI and vLLM that restrict the form of the answer."""

    response_format: ResponseFormat | None = Field(
        default=None, description="The form that the answer must have."
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None,
        description="vLLM's object for the form of the answer. At most one of its fields is set.",
    )
    guided_json: str | JsonSchema | None = Field(
        default=None, description="Older name of structured_outputs.json."
    )
    guided_regex: str | None = Field(default=None, description="Older name of structured_outputs.regex.")
    guided_choice: list[str] | None = Field(
        default=None, description="Older name of structured_outputs.choice."
    )
    guided_grammar: str | None = Field(default=None, description="Older name of structured_outputs.grammar.")


class OpenAIFields(BaseModel):
    """Fields of all routes in OpenAI's format."""

    model: str | None = Field(default=None, description="Name of the model.")
    stream: bool | None = Field(default=None, description="Whether the reply is a stream.")
    stream_options: StreamOptions | None = Field(
        default=None, description="What a stream contains in addition."
    )
    rid: str | None = Field(
        default=None,
        max_length=128,
        description="SGLang's name for a request id. It becomes the id of the reply.",
    )
    request_id: str | None = Field(default=None, max_length=128, description="vLLM's name of `rid`.")
    max_tokens: int | None = Field(default=None, description="The largest number of tokens of the answer.")
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Whether the text includes the stop string (vLLM)."
    )
    priority: int | None = Field(
        default=None, description="Requests with a higher number start first. Default: 0."
    )
    min_tokens: int | None = Field(
        default=None,
        description="Number of tokens before which no stop token or stop string ends the answer.",
    )
    speculation: SpeculationOptions | None = Field(
        default=None, description="Whether the server drafts, and how large the trees are."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Write the tokens of logprobs as token_id:N."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        description="Keep only this many tokens at the end of the prompt; -1: as many as fit.",
    )


class ChatAndCompletionFields(BaseModel):
    """Fields of ``/v1/chat/completions`` and ``/v1/completions``."""

    prompt_logprobs: int | None = Field(
        default=None, description="vLLM's logprobs of the prompt: number of alternatives per token, 0 to 20."
    )
    return_hidden_states: bool | None = Field(
        default=None, description="Return the hidden states after the final norm. Not in streams."
    )
    return_routed_experts: bool | None = Field(
        default=None, description="Return the experts that each layer chose for each token. Not in streams."
    )
    routed_experts_start_len: ExpertsStart | None = Field(
        default=None, description="Index of the first token whose experts are returned. Default: 0."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Include the token ids of prompt and answer in each choice."
    )
    return_prompt_token_ids: bool | None = Field(
        default=None, description="Include the token ids of the prompt in each choice."
    )
    add_special_tokens: bool | None = Field(
        default=None,
        description="Whether the tokenizer adds its special tokens. Default: only in completions.",
    )


class ChatFields(BaseModel):
    """Fields of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, description="The messages of the chat.")
    max_completion_tokens: int | None = Field(
        default=None, description="OpenAI's newer name of `max_tokens`."
    )
    cache_salt: Salt | None = Field(
        default=None, description="Requests share the K/V of a prompt only if they have the same salt."
    )
    extra_key: Salt | None = Field(default=None, description="SGLang's other name of `cache_salt`.")
    logprobs: bool | None = Field(default=None, description="Return the logprobs of the answer.")
    top_logprobs: int | None = Field(
        default=None, description="Number of alternatives per token, 0 to 20. Requires logprobs: true."
    )
    echo: bool | None = Field(
        default=None, description="Begin the answer with the last message, if it is the assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Allowed keys: enable_thinking, thinking, reasoning_effort."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        default=None,
        description="Variable of the chat template, which determines how long some models reason.",
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Whether the prompt ends with the header of the assistant's answer. Default: true.",
    )
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message. Requires add_generation_prompt: false."
    )
    tools: list[Tool] | None = Field(default=None, description="The functions that the answer may call.")
    tool_choice: ToolChoice | None = Field(
        default=None, description="Whether the answer must call a function, and which one."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may contain several tool calls. Default: true."
    )
    separate_reasoning: bool | None = Field(
        default=None,
        description="Whether reasoning is in reasoning_content instead of content. Default: true.",
    )
    include_reasoning: bool | None = Field(
        default=None, description="Whether answers contain their reasoning. Default: true."
    )


class CompletionFields(BaseModel):
    """Fields of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="The prompt, or a list of prompts. A prompt is a text or a list of token ids."
    )
    cache_salt: Salts | None = Field(
        default=None,
        description="Requests share the K/V of a prompt only if they have the same salt. May be a list.",
    )
    extra_key: Salts | None = Field(default=None, description="SGLang's other name of `cache_salt`.")
    logprobs: int | None = Field(default=None, description="Number of alternatives per token, 0 to 20.")
    echo: bool | None = Field(default=None, description="Begin the answer with the prompt.")
    best_of: int | None = Field(
        default=None, description="Generate this many answers and return the n with the highest mean logprob."
    )


class ResponseFields(BaseModel):
    """Fields of ``/v1/responses``."""

    max_output_tokens: int | None = Field(
        default=None, description="The largest number of tokens of the answer."
    )
    n: int | None = Field(default=None, ge=1, le=1, description="A response has one answer.")
    cache_salt: Salt | None = Field(
        default=None, description="Requests share the K/V of a prompt only if they have the same salt."
    )
    extra_key: Salt | None = Field(default=None, description="SGLang's other name of `cache_salt`.")
    top_logprobs: int | None = Field(
        default=None,
        description="Number of alternatives per token, 0 to 20. Requires 'message.output_text.logprobs' in "
        "include.",
    )
    truncation: Truncation | None = Field(
        default=None,
        description="Whether the oldest items are left out if the input does not fit: auto or disabled.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Allowed keys: enable_thinking, thinking, reasoning_effort."
    )
    tool_choice: ToolChoice | None = Field(
        default=None, description="Whether the answer must call a function, and which one."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether an answer may contain several tool calls. Default: true."
    )
