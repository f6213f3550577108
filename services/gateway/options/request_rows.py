"""Rows of the option table for the model, the input, tools, reasoning and the building of the prompt."""

from __future__ import annotations

from outrider.services.gateway.options.rows import FieldGroup, grpc, option, rest

INPUT_ROWS = (
    option(
        "model",
        "Name of the model.",
        grpc("ChatRequest.model", "string", 1),
        grpc("CompleteRequest.model", "string", 1),
        rest("model", "str", FieldGroup.OPENAI, FieldGroup.GENERATE),
        objects="/v1/messages:model",
    ),
    option(
        "messages",
        "The messages of the chat.",
        grpc("ChatRequest.messages", "repeated Message", 2),
        rest("messages", "list[Message]", FieldGroup.CHAT, bounds="min_length=1", required=True),
        objects="/v1/responses:input /v1/responses:instructions /v1/messages:messages /v1/messages:system",
    ),
    option(
        "text",
        "The prompt: a text, or a list of texts.",
        grpc("CompleteRequest.text", "string", 2, oneof="prompt"),
        rest(
            "prompt",
            "str | list[str] | list[int] | list[list[int]]",
            FieldGroup.COMPLETIONS,
            about="The prompt, or a list of prompts. A prompt is a text or a list of token ids.",
            required=True,
        ),
        rest("text", "str | list[str]", FieldGroup.GENERATE),
    ),
    option(
        "token_ids",
        "The prompt as token ids, or a list of such prompts.",
        grpc("CompleteRequest.token_ids", "TokenIds", 3, oneof="prompt"),
        rest("input_ids", "list[int] | list[list[int]]", FieldGroup.GENERATE),
    ),
    option(
        "options",
        "The options of the request.",
        grpc("ChatRequest.options", "GenerationOptions", 3),
        grpc("CompleteRequest.options", "GenerationOptions", 4),
        holds="GenerationOptions",
    ),
    option(
        "stream",
        "Whether the reply is a stream.",
        rest("stream", "bool", FieldGroup.OPENAI, FieldGroup.MESSAGES, FieldGroup.GENERATE),
        only="every reply is a stream",
    ),
    option(
        "stream_options",
        "What a stream contains in addition.",
        rest("stream_options", "StreamOptions", FieldGroup.OPENAI),
        only="`Finished` always contains the usage",
    ),
    option(
        "rid",
        "SGLang's name for a request id. It becomes the id of the reply.",
        grpc("GenerationOptions.rid", "string", 20, "Name of the request for Abort."),
        rest("rid", "str", FieldGroup.OPENAI, bounds="max_length=128"),
        rest("request_id", "str", FieldGroup.OPENAI, about="vLLM's name of `rid`.", bounds="max_length=128"),
        rest(
            "rid",
            "RequestName | list[RequestName]",
            FieldGroup.GENERATE,
            about="Id of the request, or a list with one id per prompt.",
        ),
    ),
)

PROMPT_ROWS = (
    option(
        "truncate_prompt_tokens",
        "Keep only this many tokens at the end of the prompt; -1: as many as fit.",
        grpc(
            "GenerationOptions.truncate_prompt_tokens",
            "optional sint32",
            22,
            "Keep only this many tokens at the end of the prompt; -1 keeps as many as fit.",
        ),
        rest("truncate_prompt_tokens", "int", FieldGroup.OPENAI, bounds="ge=-1"),
    ),
    option(
        "truncation",
        "Whether the oldest items are left out if the input does not fit: auto or disabled.",
        rest("truncation", "Truncation", FieldGroup.RESPONSES),
        only="part of OpenAI's Responses API",
    ),
    option(
        "add_special_tokens",
        "Whether the tokenizer adds its special tokens. Default: only in completions.",
        grpc(
            "CompleteRequest.add_special_tokens",
            "optional bool",
            5,
            "Whether the tokenizer adds its special tokens to `text`; absent means true.",
        ),
        grpc(
            "ChatPrompt.add_special_tokens",
            "bool",
            5,
            "Adds the tokenizer's special tokens to those of the template.",
        ),
        rest("add_special_tokens", "bool", FieldGroup.CHAT_AND_COMPLETIONS),
    ),
    option(
        "prompt",
        "Variables of the chat template, and how the prompt of a chat ends.",
        grpc("ChatRequest.prompt", "ChatPrompt", 8),
        holds="ChatPrompt",
    ),
    option(
        "template_kwargs",
        "Variables of the chat template.",
        grpc("ChatPrompt.template_kwargs", "string", 1, 'A JSON object, such as {"enable_thinking": false}.'),
        rest(
            "chat_template_kwargs",
            "dict[str, Any]",
            FieldGroup.CHAT,
            FieldGroup.RESPONSES,
            about="Allowed keys: enable_thinking, thinking, reasoning_effort.",
        ),
        objects="/v1/messages:thinking",
    ),
    option(
        "reasoning_effort",
        "Variable of the chat template, which determines how long some models reason.",
        grpc("ChatPrompt.reasoning_effort", "string", 2),
        rest("reasoning_effort", "ReasoningEffort", FieldGroup.CHAT),
        objects="/v1/responses:reasoning.effort /v1/messages:output_config.effort",
    ),
    option(
        "add_generation_prompt",
        "Whether the prompt ends with the header of the assistant's answer. Default: true.",
        grpc(
            "ChatPrompt.add_generation_prompt",
            "optional bool",
            3,
            "Whether the prompt ends with the header of the assistant's answer; absent means true.",
        ),
        rest("add_generation_prompt", "bool", FieldGroup.CHAT),
    ),
    option(
        "continue_final_message",
        "Continue the last message. Requires add_generation_prompt: false.",
        grpc(
            "ChatPrompt.continue_final_message",
            "bool",
            4,
            "Continues the last message. Requires add_generation_prompt = false.",
        ),
        rest("continue_final_message", "bool", FieldGroup.CHAT),
    ),
)

TOOL_ROWS = (
    option(
        "tools",
        "The functions that the answer may call.",
        grpc("ChatRequest.tools", "repeated Tool", 4),
        rest("tools", "list[Tool]", FieldGroup.CHAT),
        objects="/v1/responses:tools /v1/messages:tools",
    ),
    option(
        "tool_choice",
        "Whether the answer must call a function, and which one.",
        grpc(
            "ChatRequest.tool_choice",
            "string",
            9,
            "auto, none, required, or the name of a tool. Empty means auto.",
        ),
        rest("tool_choice", "ToolChoice", FieldGroup.CHAT, FieldGroup.RESPONSES),
        objects="/v1/messages:tool_choice",
    ),
    option(
        "parallel_tool_calls",
        "Whether an answer may contain several tool calls. Default: true.",
        grpc("ChatRequest.parallel_tool_calls", "optional bool", 5),
        rest("parallel_tool_calls", "bool", FieldGroup.CHAT, FieldGroup.RESPONSES),
        objects="/v1/messages:tool_choice.disable_parallel_tool_use",
    ),
    option(
        "separate_reasoning",
        "Whether reasoning is in reasoning_content instead of content. Default: true.",
        grpc("ChatRequest.join_reasoning", "bool", 6, "Puts reasoning into `text` instead of `reasoning`."),
        rest("separate_reasoning", "bool", FieldGroup.CHAT),
    ),
    option(
        "include_reasoning",
        "Whether answers contain their reasoning. Default: true.",
        grpc("ChatRequest.omit_reasoning", "bool", 7, "Leaves reasoning out of the answer."),
        rest("include_reasoning", "bool", FieldGroup.CHAT),
    ),
)
