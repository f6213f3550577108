"""Rows of the options for the form of an answer, for speculation, and for the data of the reply."""

from __future__ import annotations

from outrider.services.gateway.options.rows import FieldGroup, grpc, option, rest

_SPECULATION_MODE = 'Literal["auto", "on", "off"]'

SPECULATION_ROWS = (
    option(
        "speculation",
        "Whether the server drafts, and how large the trees are.",
        grpc("GenerationOptions.speculation", "outrider.common.v1.SpeculationOptions", 3),
        rest(
            "speculation", "SpeculationOptions", FieldGroup.OPENAI, FieldGroup.MESSAGES, FieldGroup.GENERATE
        ),
        holds="SpeculationOptions",
    ),
    option(
        "mode",
        "auto: the server decides in which rounds it drafts; on: in every round; off: in none.",
        grpc("SpeculationOptions.mode", "SpeculationMode", 1),
        rest("mode", _SPECULATION_MODE, FieldGroup.SPECULATION),
    ),
    option(
        "depth",
        "The largest number of levels of the tree.",
        grpc("SpeculationOptions.depth", "optional uint32", 2),
        rest("depth", "int", FieldGroup.SPECULATION),
    ),
    option(
        "topk",
        "Number of branches per level. With 1, the tree is a chain.",
        grpc("SpeculationOptions.topk", "optional uint32", 3),
        rest("topk", "int", FieldGroup.SPECULATION),
    ),
    option(
        "max_nodes",
        "The largest number of nodes of the tree, including the root.",
        grpc(
            "SpeculationOptions.max_nodes",
            "optional uint32",
            4,
            "Nodes verified per round, including the root: 1 means no draft nodes.",
        ),
        rest("max_nodes", "int", FieldGroup.SPECULATION),
    ),
    option(
        "trace",
        "Whether the reply contains the tree of every round.",
        grpc("SpeculationOptions.trace", "bool", 5),
        rest("trace", "bool", FieldGroup.SPECULATION, default="False"),
    ),
)

LOGPROB_ROWS = (
    option(
        "logprobs",
        "The logprobs that the reply contains.",
        grpc("GenerationOptions.logprobs", "outrider.common.v1.LogprobOptions", 9),
        holds="LogprobOptions",
    ),
    option(
        "top",
        "Number of alternatives per token, 0 to 20.",
        grpc(
            "LogprobOptions.top",
            "optional uint32",
            1,
            "Number of the most likely tokens to report beside each output token; absent reports no output "
            "logprobs.",
        ),
        rest("logprobs", "bool", FieldGroup.CHAT, about="Return the logprobs of the answer."),
        rest("logprobs", "int", FieldGroup.COMPLETIONS),
        rest(
            "top_logprobs",
            "int",
            FieldGroup.CHAT,
            about="Number of alternatives per token, 0 to 20. Requires logprobs: true.",
        ),
        rest(
            "return_logprob",
            "bool | list[bool]",
            FieldGroup.GENERATE,
            about="Whether to return logprobs. This and the next two may be lists, one entry per prompt.",
        ),
        rest("top_logprobs_num", "int | list[int]", FieldGroup.GENERATE),
        rest(
            "top_logprobs",
            "int",
            FieldGroup.RESPONSES,
            about="Number of alternatives per token, 0 to 20. Requires 'message.output_text.logprobs' in "
            "include.",
        ),
        objects="/v1/responses:include",
    ),
    option(
        "prompt_top",
        "vLLM's logprobs of the prompt: number of alternatives per token, 0 to 20.",
        grpc("LogprobOptions.prompt_top", "optional uint32", 2, "The same for prompt tokens."),
        rest("prompt_logprobs", "int", FieldGroup.CHAT_AND_COMPLETIONS),
    ),
    option(
        "prompt_start",
        "First prompt token whose logprob to return; -1 for no prompt token.",
        grpc(
            "LogprobOptions.prompt_start",
            "uint32",
            3,
            "Index of the first prompt token to report. Token 0 has no logprob.",
        ),
        rest("logprob_start_len", "StartLength | list[StartLength]", FieldGroup.GENERATE),
    ),
    option(
        "token_ids_logprob",
        "Token ids whose logprobs to return at each token, or a list per prompt.",
        grpc(
            "LogprobOptions.token_ids",
            "repeated uint32",
            4,
            "Tokens whose log-probabilities to report at each reported position.",
        ),
        rest("token_ids_logprob", "list[int] | list[list[int]]", FieldGroup.GENERATE),
    ),
    option(
        "return_tokens_as_token_ids",
        "Write the tokens of logprobs as token_id:N.",
        rest("return_tokens_as_token_ids", "bool", FieldGroup.OPENAI),
        only="logprobs always have token ids",
    ),
    option(
        "return_text_in_logprobs",
        "Whether the logprobs contain the text of their tokens.",
        rest("return_text_in_logprobs", "bool", FieldGroup.GENERATE),
        only="`Detokenize` returns the text of each token id",
    ),
)

STATE_ROWS = (
    option(
        "states",
        "The states of tokens that the reply contains.",
        grpc(
            "GenerationOptions.states",
            "outrider.common.v1.StateOptions",
            23,
            "The states of tokens to report.",
        ),
        holds="StateOptions",
    ),
    option(
        "return_hidden_states",
        "Return the hidden states after the final norm. Not in streams.",
        grpc("StateOptions.hidden_states", "bool", 1, "The hidden states after the final norm."),
        rest("return_hidden_states", "bool", FieldGroup.CHAT_AND_COMPLETIONS),
        rest("return_hidden_states", "bool | list[bool]", FieldGroup.GENERATE),
    ),
    option(
        "return_routed_experts",
        "Return the experts that each layer chose for each token. Not in streams.",
        grpc("StateOptions.routed_experts", "bool", 2, "The experts that each sparse layer chose."),
        rest("return_routed_experts", "bool", FieldGroup.CHAT_AND_COMPLETIONS, FieldGroup.GENERATE),
    ),
    option(
        "routed_experts_start_len",
        "Index of the first token whose experts are returned. Default: 0.",
        grpc(
            "StateOptions.start",
            "uint32",
            3,
            "Index of the first token to report. Token 0 is the first token of the prompt.",
        ),
        rest(
            "routed_experts_start_len", "ExpertsStart", FieldGroup.CHAT_AND_COMPLETIONS, FieldGroup.GENERATE
        ),
    ),
)

OUTPUT_ROWS = (
    option(
        "constraint",
        "The form that the answer must have.",
        grpc(
            "GenerationOptions.constraint",
            "outrider.common.v1.Constraint",
            21,
            "The form of the answer. The gateway sets begins_after, opening and field.",
        ),
        rest(
            "json_schema",
            "str | JsonSchema",
            FieldGroup.FORMS,
            about="A JSON schema that the answer has to match, as JSON or as text.",
        ),
        rest(
            "regex", "str", FieldGroup.FORMS, about="A regular expression that the whole answer has to match."
        ),
        rest("ebnf", "str", FieldGroup.FORMS, about="A grammar in EBNF that the answer has to follow."),
        rest("response_format", "ResponseFormat", FieldGroup.OPENAI_FORMS),
        rest(
            "structured_outputs",
            "StructuredOutputs",
            FieldGroup.OPENAI_FORMS,
            about="vLLM's object for the form of the answer. At most one of its fields is set.",
        ),
        rest(
            "guided_json",
            "str | JsonSchema",
            FieldGroup.OPENAI_FORMS,
            about="Older name of structured_outputs.json.",
        ),
        rest("guided_regex", "str", FieldGroup.OPENAI_FORMS, about="Older name of structured_outputs.regex."),
        rest(
            "guided_choice",
            "list[str]",
            FieldGroup.OPENAI_FORMS,
            about="Older name of structured_outputs.choice.",
        ),
        rest(
            "guided_grammar",
            "str",
            FieldGroup.OPENAI_FORMS,
            about="Older name of structured_outputs.grammar.",
        ),
        objects="/v1/responses:text.format /v1/messages:output_config.format",
    ),
    *SPECULATION_ROWS,
    *LOGPROB_ROWS,
    *STATE_ROWS,
    option(
        "return_token_ids",
        "Include the token ids of prompt and answer in each choice.",
        rest("return_token_ids", "bool", FieldGroup.CHAT_AND_COMPLETIONS),
        only="token ids are always returned",
    ),
    option(
        "return_prompt_token_ids",
        "Include the token ids of the prompt in each choice.",
        rest("return_prompt_token_ids", "bool", FieldGroup.CHAT_AND_COMPLETIONS, FieldGroup.GENERATE),
        only="`Tokenize` returns the token ids of a prompt",
    ),
    option(
        "echo",
        "Begin the answer with the prompt.",
        rest(
            "echo",
            "bool",
            FieldGroup.CHAT,
            about="Begin the answer with the last message, if it is the assistant's.",
        ),
        rest("echo", "bool", FieldGroup.COMPLETIONS),
        only="the client already has the prompt",
    ),
    option(
        "best_of",
        "Generate this many answers and return the n with the highest mean logprob.",
        rest("best_of", "int", FieldGroup.COMPLETIONS),
        only="`best_of` is not available in streams, and every reply of gRPC is a stream",
    ),
)
