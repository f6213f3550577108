"""Lists which options of `outrider verify` test each request option, and which need no test."""

from __future__ import annotations

from collections.abc import Mapping

COVERED: Mapping[str, tuple[str, ...]] = {
    "sampling": ("temperature 1",),
    "max_tokens": ("max_tokens",),
    "temperature": ("greedy", "temperature 0.7", "temperature 1", "temperature 1.5"),
    "top_k": ("top_k", "all filters"),
    "top_p": ("top_p", "all filters"),
    "min_p": ("min_p", "all filters"),
    "seed": ("seed",),
    "n": ("n",),
    "choice_index": ("n",),
    "best_of": ("best_of",),
    "stop": ("stop",),
    "stop_token_ids": ("stop_token_ids", "sampled stop"),
    "ignore_eos": ("end of text",),
    "presence_penalty": ("penalties",),
    "frequency_penalty": ("penalties",),
    "repetition_penalty": ("penalties",),
    "logit_bias": ("logit_bias",),
    "min_tokens": ("min_tokens",),
    "allowed_token_ids": ("allowed_token_ids",),
    "bad_words": ("bad_words",),
    "bad_word_ids": ("bad_words",),
    "constraint": ("json_schema", "regex", "choice", "ebnf"),
    "tools": ("ebnf",),
    "tool_choice": ("ebnf",),
    "parallel_tool_calls": ("ebnf",),
    "logprobs": ("logprobs", "logprobs of sampled tokens"),
    "top": ("logprobs", "logprobs of sampled tokens"),
    "prompt_top": ("logprobs",),
    "prompt_start": ("token_ids_logprob",),
    "token_ids_logprob": ("token_ids_logprob",),
    "states": ("hidden states", "routed experts"),
    "return_hidden_states": ("hidden states",),
    "return_routed_experts": ("routed experts",),
    "routed_experts_start_len": ("routed experts",),
}
"""Name of a request option → names of the options of `cases.OPTIONS` that use it.

Tool calls are enforced by a grammar, so `ebnf` covers them.
"""

_PROMPT = "changes the prompt before the target gets it"
_FORMAT = "changes the format of the reply after the tokens are chosen"
_RUN = "chooses how to speculate: each run of the command has its own value"
NOT_COMPARED: Mapping[str, str] = {
    "model": "selects the target",
    "messages": _PROMPT,
    "text": _PROMPT,
    "token_ids": _PROMPT,
    "prompt": _PROMPT,
    "truncate_prompt_tokens": _PROMPT,
    "add_special_tokens": _PROMPT,
    "template_kwargs": _PROMPT,
    "reasoning_effort": _PROMPT,
    "add_generation_prompt": _PROMPT,
    "continue_final_message": _PROMPT,
    "options": "contains other options",
    "stream": _FORMAT,
    "stream_options": _FORMAT,
    "rid": "names the request",
    "include_stop_string": _FORMAT,
    "skip_special_tokens": _FORMAT,
    "return_tokens_as_token_ids": _FORMAT,
    "return_text_in_logprobs": _FORMAT,
    "return_token_ids": _FORMAT,
    "echo": _FORMAT,
    "separate_reasoning": _FORMAT,
    "include_reasoning": _FORMAT,
    "priority": "determines when a request starts",
    "cache_salt": "the command stores no prefixes, so every prompt is computed",
    "speculation": _RUN,
    "mode": _RUN,
    "depth": _RUN,
    "topk": _RUN,
    "max_nodes": _RUN,
    "trace": _FORMAT,
}
"""Name of a request option → the reason why there is nothing to compare."""
