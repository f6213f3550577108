"""Writes the table of request fields into docs/api.md, or checks that the table is up to date.

The status of a field comes from the request models and from `schemas/field_rules.py`. This script itself
lists only the fields that the other APIs (such as OpenAI's) define. Run `python scripts/request_fields.py`
after a change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from page_section import replaced, update_page

from outrider.services.gateway.schemas.anthropic import MessagesRequest
from outrider.services.gateway.schemas.base import OpenModel
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.schemas.completions import CompletionRequest
from outrider.services.gateway.schemas.field_rules import REFUSED
from outrider.services.gateway.schemas.native import NativeRequest, NativeSamplingParams
from outrider.services.gateway.schemas.responses import ResponsesRequest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
BEGIN, END = "<!-- request fields: begin -->\n", "<!-- request fields: end -->\n"


def _names(text: str) -> list[str]:
    return text.split()


OPENAI_CHAT = _names("""
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed
service_tier stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity
web_search_options
""")
OPENAI_RESPONSES = _names("""
access_programs background context_management conversation image include input instructions max_output_tokens
max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
stream_options temperature text tool_choice tools top_logprobs top_p truncation user
""")
ANTHROPIC = _names("""
cache_control container diagnostics inference_geo max_tokens mcp_servers messages metadata model output_config
service_tier speed stop_sequences stream system temperature thinking tool_choice tools top_k top_p
user_profile_id workspace_id
""")
OPENAI_COMPLETIONS = _names("""
best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream
stream_options suffix temperature top_p user
""")
VLLM = _names("""
add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message documents echo ec_transfer_params guided_choice guided_grammar
guided_json guided_regex ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params
length_penalty logits_processors media_io_kwargs min_p min_tokens mm_processor_kwargs priority prompt_embeds
prompt_logprobs repetition_detection repetition_penalty request_id return_token_ids return_tokens_as_token_ids
session_id skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
""")
SGLANG_OPENAI = _names("""
bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
custom_labels custom_logit_processor custom_params data_parallel_rank ebnf extra_key ignore_eos images_config
input_ids json_schema lora_path min_p min_tokens no_stop_trim priority regex repetition_penalty
return_cached_tokens_details return_hidden_states return_prompt_token_ids return_routed_experts
return_token_ids rid routed_dp_rank routed_experts_start_len sampling_seed separate_reasoning session_params
skip_special_tokens stop_regex stop_token_ids stream_reasoning task top_k
""")
SGLANG_NATIVE = _names("""
audio_data background bootstrap_host bootstrap_port bootstrap_room cache_salt conversation_id custom_labels
custom_logit_processor data_parallel_rank extra_key image_data input_embeds input_ids log_metrics
logprob_start_len lora_path max_thinking_tokens modalities no_logs priority return_entropy
return_hidden_states return_logprob return_prompt_token_ids return_routed_experts return_sampling_mask
return_text_in_logprobs rid routed_dp_rank routed_experts_start_len sampling_params session_params stream text
token_ids_logprob top_logprobs_num video_data
""")
SGLANG_SAMPLING = _names("""
custom_params ebnf frequency_penalty ignore_eos json_schema logit_bias max_new_tokens min_new_tokens min_p n
no_stop_trim presence_penalty regex repetition_penalty sampling_seed skip_special_tokens
spaces_between_special_tokens stop stop_regex stop_token_ids structural_tag temperature top_k top_p
""")

_OPENAI_0_1_0 = _names("""
cache_salt ignore_eos include_stop_str_in_output max_tokens metadata min_p model n priority prompt_cache_key
prompt_cache_retention return_token_ids rid safety_identifier seed service_tier skip_special_tokens
speculation stop stop_token_ids store stream stream_options temperature top_k top_p user
""")
FIRST_RELEASE = "0.1.0"
UNRELEASED = "unreleased"
OF_FIRST_RELEASE: dict[str, list[str]] = {
    "/v1/chat/completions": [
        *_OPENAI_0_1_0,
        *_names("""
chat_template_kwargs max_completion_tokens messages parallel_tool_calls prediction reasoning_effort
separate_reasoning verbosity
"""),
    ],
    "/v1/completions": [*_OPENAI_0_1_0, "echo", "prompt"],
    "/generate": _names("cache_salt input_ids model priority rid sampling_params speculation stream text"),
    "/generate, sampling_params": _names("""
ignore_eos max_new_tokens min_p n no_stop_trim sampling_seed seed skip_special_tokens stop stop_token_ids
temperature top_k top_p
"""),
}
"""Route → the fields that 0.1.0 took, with or without an effect. It refused all other fields."""

ROUTES: tuple[tuple[str, type[OpenModel], dict[str, list[str]]], ...] = (
    (
        "/v1/chat/completions",
        ChatRequest,
        {"OpenAI": OPENAI_CHAT, "vLLM": VLLM, "SGLang": [*SGLANG_OPENAI, "return_meta_info"]},
    ),
    (
        "/v1/completions",
        CompletionRequest,
        {"OpenAI": OPENAI_COMPLETIONS, "vLLM": VLLM, "SGLang": SGLANG_OPENAI},
    ),
    ("/v1/responses", ResponsesRequest, {"OpenAI": OPENAI_RESPONSES}),
    ("/v1/messages", MessagesRequest, {"Anthropic": ANTHROPIC}),
    ("/generate", NativeRequest, {"SGLang": SGLANG_NATIVE}),
    ("/generate, sampling_params", NativeSamplingParams, {"SGLang": SGLANG_SAMPLING}),
)
STATUSES = ("taken", "no effect", "ignored", "refused")


def field_status(model: type[OpenModel], name: str) -> str:
    """Return how the route of `model` treats the field `name`, as one of `STATUSES`."""
    neutral = getattr(model, "NEUTRAL", {})
    if name in neutral or (name not in model.model_fields and name in REFUSED):
        return "refused"
    if name not in model.model_fields:
        return "ignored"
    return "no effect" if name in getattr(model, "NO_EFFECT", ()) else "taken"


def since(route: str, status: str, name: str) -> str:
    """Return the version since which a route treats a field this way."""
    released = OF_FIRST_RELEASE.get(route)
    if released is None or status == "ignored":
        return UNRELEASED
    return FIRST_RELEASE if (status == "refused") != (name in released) else UNRELEASED


def table() -> str:
    """Return the table as Markdown.

    The table has one row for each route, status and version. A row lists the fields and the APIs that define
    each field.
    """
    rows = ["| route | status | since | fields |", "| --- | --- | --- | --- |"]
    for route, model, apis in ROUTES:
        names = sorted({*model.model_fields, *(name for api in apis.values() for name in api)})
        for one in STATUSES:
            for version in (FIRST_RELEASE, UNRELEASED):
                listed = [
                    _marked(name, apis)
                    for name in names
                    if field_status(model, name) == one and since(route, one, name) == version
                ]
                if listed:
                    rows.append(f"| `{route}` | {one} | {version} | {', '.join(listed)} |")
    return "\n".join(rows) + "\n"


def _marked(name: str, apis: dict[str, list[str]]) -> str:
    """Return the name, followed by the initials of the APIs that define the field on this route.

    A field of OpenAI's API gets only OpenAI's initial, because vLLM and SGLang have copied the field.
    """
    owners = [api for api, names in apis.items() if name in names]
    if "OpenAI" in owners:
        owners = ["OpenAI"]
    initials = "".join(api[0].upper() for api in owners)
    return f"`{name}` {initials or '+'}"


def main(arguments: list[str]) -> int:
    """Write the table into the page. With ``--check``, only return 1 if the page's table is out of date."""
    page = replaced(PAGE.read_text(encoding="utf-8"), BEGIN, END, f"\n{table()}\n")
    return update_page(PAGE, page, arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
