"""Rows of the options that determine which tokens are chosen, and where an answer ends."""

from __future__ import annotations

from outrider.services.gateway.options.rows import FieldGroup, Range, Reader, grpc, option, rest

_TOP_K = Range(-1, (1 << 31) - 1, f"between 1 and {(1 << 31) - 1}, or -1 or 0 to disable it")
_INT_32 = Range(-(1 << 31), (1 << 31) - 1, "a 32-bit integer")
_SEED = Range(-(1 << 63), (1 << 64) - 1, "a 64-bit integer")

PARAMETERS = (
    option(
        "max_tokens",
        "The largest number of tokens of the answer.",
        grpc("GenerationOptions.max_tokens", "optional uint32", 1),
        rest("max_tokens", "int", FieldGroup.OPENAI),
        rest("max_completion_tokens", "int", FieldGroup.CHAT, about="OpenAI's newer name of `max_tokens`."),
        rest("max_new_tokens", "int", FieldGroup.GENERATE_SAMPLING),
        rest("max_output_tokens", "int", FieldGroup.RESPONSES),
        rest("max_tokens", "int", FieldGroup.MESSAGES, required=True),
        reader=Reader.PARAMETERS,
    ),
    option(
        "temperature",
        "The logits are divided by this number, 0 to 2. With 0, the most likely token is chosen.",
        grpc("SamplingOptions.temperature", "optional float", 1, "0 selects greedy decoding."),
        rest("temperature", "float", FieldGroup.SAMPLING, FieldGroup.MESSAGES),
        reader=Reader.PARAMETERS,
        allowed=Range(0, 2, "between 0 and 2"),
    ),
    option(
        "top_k",
        "Choose among this many of the most likely tokens; -1 or 0: among all tokens.",
        grpc("SamplingOptions.top_k", "optional uint32", 2, "0 or absent disables the filter."),
        rest("top_k", "int", FieldGroup.SAMPLING, FieldGroup.MESSAGES),
        reader=Reader.PARAMETERS,
        allowed=_TOP_K,
    ),
    option(
        "top_p",
        "Choose among the most likely tokens that together have at least this probability.",
        grpc("SamplingOptions.top_p", "optional float", 3),
        rest("top_p", "float", FieldGroup.SAMPLING, FieldGroup.MESSAGES),
        reader=Reader.PARAMETERS,
        allowed=Range(0, 1, "above 0 and at most 1", above=True),
    ),
    option(
        "min_p",
        "Drop tokens whose probability is below this fraction of the highest probability.",
        grpc("SamplingOptions.min_p", "optional float", 4),
        rest("min_p", "float", FieldGroup.SAMPLING, FieldGroup.MESSAGES),
        reader=Reader.PARAMETERS,
        allowed=Range(0, 1, "between 0 and 1"),
    ),
    option(
        "seed",
        "Seed of the sampling noise, a 64-bit integer.",
        grpc("SamplingOptions.seed", "optional uint64", 5),
        rest("seed", "int", FieldGroup.SAMPLING, FieldGroup.MESSAGES),
        rest("sampling_seed", "int", FieldGroup.SAMPLING, about="SGLang's name of `seed`."),
        reader=Reader.PARAMETERS,
        allowed=_SEED,
    ),
    option(
        "n",
        "Number of answers to each prompt.",
        grpc(
            "GenerationOptions.n",
            "optional uint32",
            16,
            "Number of answers. Their events have different indexes.",
        ),
        rest("n", "int", FieldGroup.SAMPLING),
        rest("n", "int", FieldGroup.RESPONSES, about="A response has one answer.", bounds="ge=1, le=1"),
        reader=Reader.PARAMETERS,
    ),
    option(
        "stop",
        "Texts that end the answer.",
        grpc("GenerationOptions.stop", "repeated string", 4),
        rest("stop", "StopStrings", FieldGroup.SAMPLING),
        rest("stop_sequences", "list[str]", FieldGroup.MESSAGES),
        reader=Reader.PARAMETERS,
        default=(),
    ),
    option(
        "stop_regex",
        "Regular expressions. The token that completes a match ends the answer.",
        grpc("GenerationOptions.stop_regex", "repeated string", 24),
        rest("stop_regex", "StopStrings", FieldGroup.SAMPLING),
        reader=Reader.PARAMETERS,
        default=(),
    ),
    option(
        "stop_token_ids",
        "Tokens that end the answer.",
        grpc("GenerationOptions.stop_token_ids", "repeated uint32", 5),
        rest("stop_token_ids", "TokenIds", FieldGroup.SAMPLING),
        reader=Reader.PARAMETERS,
        default=(),
    ),
    option(
        "ignore_eos",
        "Whether the answer continues after the model's end-of-sequence tokens.",
        grpc("GenerationOptions.ignore_eos", "bool", 6),
        rest("ignore_eos", "bool", FieldGroup.SAMPLING),
        reader=Reader.PARAMETERS,
        default=False,
    ),
    option(
        "include_stop_string",
        "Whether the text includes the stop string (vLLM).",
        grpc("GenerationOptions.include_stop_string", "bool", 18),
        rest("include_stop_str_in_output", "bool", FieldGroup.OPENAI),
        rest(
            "no_stop_trim",
            "bool",
            FieldGroup.SAMPLING,
            about="Whether the text includes the stop string (SGLang).",
        ),
        reader=Reader.PARAMETERS,
        default=False,
    ),
    option(
        "skip_special_tokens",
        "Whether the text leaves out special tokens. Default: true.",
        grpc("GenerationOptions.skip_special_tokens", "optional bool", 7),
        rest("skip_special_tokens", "bool", FieldGroup.SAMPLING),
        reader=Reader.PARAMETERS,
        default=True,
    ),
    option(
        "priority",
        "Requests with a higher number start first. Default: 0.",
        grpc("GenerationOptions.priority", "int32", 17),
        rest("priority", "int", FieldGroup.OPENAI, FieldGroup.GENERATE),
        reader=Reader.PARAMETERS,
        default=0,
        allowed=_INT_32,
        is_outer=True,
    ),
    option(
        "cache_salt",
        "Requests share the K/V of a prompt only if they have the same salt.",
        grpc("GenerationOptions.cache_salt", "string", 19),
        rest("cache_salt", "Salt", FieldGroup.CHAT, FieldGroup.RESPONSES),
        rest(
            "extra_key",
            "Salt",
            FieldGroup.CHAT,
            FieldGroup.RESPONSES,
            about="SGLang's other name of `cache_salt`.",
        ),
        rest(
            "cache_salt",
            "Salts",
            FieldGroup.COMPLETIONS,
            FieldGroup.GENERATE,
            about="Requests share the K/V of a prompt only if they have the same salt. May be a list.",
        ),
        rest(
            "extra_key",
            "Salts",
            FieldGroup.COMPLETIONS,
            FieldGroup.GENERATE,
            about="SGLang's other name of `cache_salt`.",
        ),
        reader=Reader.PARAMETERS,
        default="",
        is_outer=True,
    ),
)
"""Options that become attributes of `Parameters`."""

RULES = (
    option(
        "presence_penalty",
        "Subtracted from the logits of tokens that the answer contains; -2 to 2.",
        grpc(
            "SamplingOptions.presence_penalty",
            "optional float",
            7,
            "Subtracted from the logits of tokens that the output contains: once, or once per occurrence.",
        ),
        rest("presence_penalty", "float", FieldGroup.SAMPLING),
        reader=Reader.RULES,
    ),
    option(
        "frequency_penalty",
        "Subtracted once per occurrence of a token in the answer; -2 to 2.",
        grpc("SamplingOptions.frequency_penalty", "optional float", 8),
        rest("frequency_penalty", "float", FieldGroup.SAMPLING),
        reader=Reader.RULES,
    ),
    option(
        "repetition_penalty",
        "Makes tokens of prompt and answer less likely if above 1 (Hugging Face).",
        grpc(
            "SamplingOptions.repetition_penalty",
            "optional float",
            9,
            "Divides the positive and multiplies the negative logits of tokens in the prompt or the output.",
        ),
        rest("repetition_penalty", "float", FieldGroup.SAMPLING),
        reader=Reader.RULES,
    ),
    option(
        "logit_bias",
        "Token ids and the numbers, -100 to 100, that are added to their logits.",
        grpc("SamplingOptions.logit_bias", "map<uint32, float>", 10, "Added to the logits of these tokens."),
        rest("logit_bias", "dict[str, float]", FieldGroup.SAMPLING),
        reader=Reader.RULES,
    ),
    option(
        "min_tokens",
        "Number of tokens before which no stop token or stop string ends the answer.",
        grpc(
            "SamplingOptions.min_tokens",
            "uint32",
            11,
            "No stop token and no end-of-sequence token is chosen before the output has this many tokens.",
        ),
        rest("min_tokens", "int", FieldGroup.OPENAI),
        rest("min_new_tokens", "int", FieldGroup.GENERATE_SAMPLING),
        reader=Reader.RULES,
    ),
    option(
        "allowed_token_ids",
        "The only tokens that may be chosen.",
        grpc(
            "SamplingOptions.allowed_token_ids",
            "repeated uint32",
            12,
            "The only tokens that may be chosen; empty allows all.",
        ),
        rest("allowed_token_ids", "list[int]", FieldGroup.SAMPLING),
        reader=Reader.RULES,
    ),
    option(
        "bad_words",
        "Texts that the answer must not contain.",
        grpc(
            "GenerationOptions.bad_words",
            "repeated string",
            8,
            "Texts that the answer must not contain. sampling.bad_words takes token ids instead.",
        ),
        rest("bad_words", "list[str]", FieldGroup.SAMPLING),
        reader=Reader.RULES,
        default=(),
    ),
    option(
        "bad_word_ids",
        "Token ids of texts that the answer must not contain.",
        grpc(
            "SamplingOptions.bad_words",
            "repeated TokenSequence",
            13,
            "Token sequences that the output must not contain.",
        ),
        reader=Reader.RULES,
        default=(),
        only="like `bad_words`, but as token ids",
    ),
)
"""Options that become attributes of `RequestedRules`."""

SAMPLING_ROWS = (
    option(
        "sampling",
        "How the next token is chosen.",
        grpc("GenerationOptions.sampling", "outrider.common.v1.SamplingOptions", 2),
        holds="SamplingOptions",
        objects="/generate:sampling_params",
    ),
    *PARAMETERS,
    *RULES,
    option(
        "choice_index",
        "Number of the answer among the `n` answers.",
        grpc("SamplingOptions.choice_index", "uint32", 6),
        only="set by the server",
    ),
)
