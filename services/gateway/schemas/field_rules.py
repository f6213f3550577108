"""Rules for request fields that the request models do not declare: refused fields, and neutral values.

A field that is neither declared nor listed here is ignored with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALWAYS_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "")
"""Values that mean "not used" in every optional field. They cause no warning."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    # Fields that would make the prompt different from the one that this server computes.
    "chat_template": (),
    "documents": (),
    "input_embeds": (),
    "input_ids": (),
    "prompt_embeds": (),
    "positional_embed_overrides": (),
    "truncation_side": ("left",),
    "add_special_tokens": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "lora_path": (),
    "lora_id": (),
    "session_params": (),
    "task": (),
    # Fields that would change which tokens are chosen.
    "best_of": (1,),
    "use_beam_search": (),
    "suffix": (),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "logit_bias": (),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "bad_words": (),
    "allowed_token_ids": (),
    "logits_processors": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "watermarking": (),
    "stop_regex": (),
    "repetition_detection": (),
    # Samplers of other servers. Clients that do not use a sampler often send the values of its other fields,
    # such as `mirostat_tau`, so only the field that switches the sampler on is refused.
    "repeat_penalty": (1, 1.0),
    "encoder_repetition_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "penalty_alpha": (0, 0.0),
    "typical": (1, 1.0),
    "typical_p": (1, 1.0),
    "top_a": (0, 0.0),
    "tfs": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "xtc_probability": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "dynamic_temperature": (),
    "dynatemp_range": (0, 0.0),
    "dynatemp_min": (),
    "dynatemp_max": (),
    "smoothing_factor": (0, 0.0),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "top_n_sigma": (0, 0.0, -1, -1.0),
    "nsigma": (0, 0.0, -1, -1.0),
    "num_beams": (1,),
    "thinking_token_budget": (-1,),
    "max_thinking_tokens": (),
    # Fields that would constrain the output.
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "grammar": (),
    "grammar_string": (),
    "guided_json_object": (),
    "guided_whitespace_pattern": (),
    "whitespace_pattern": (),
    "disable_additional_properties": (),
    "functions": (),
    "function_call": ("none", "auto"),
    # Fast tokenizers ignore this field, so the text is the same with true and with false.
    "spaces_between_special_tokens": (True,),
    # Fields that ask for data which the reply would lack.
    "logprobs": (),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "return_logprob": (),
    "top_logprobs_num": (0,),
    "token_ids_logprob": (),
    "return_sampling_mask": (),
    "return_token_ids": (),
    "return_prompt_token_ids": (),
    "return_hidden_states": (),
    "return_routed_experts": (),
    "return_indexer_topk": (),
    "return_entropy": (),
    "return_meta_info": (),
}
"""Maps each refused field to the values that it still accepts, in addition to `ALWAYS_NEUTRAL`.

A field is refused if ignoring it would change the text or leave out data of the reply. The accepted values
ask for nothing.
"""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # The white space of constrained JSON is fixed anyway.
    "disable_any_whitespace": (True,),
    "length_penalty": (1, 1.0),
    "log_metrics": (True,),
    "return_mm_kwargs": (True,),
    "return_text_in_logprobs": (True,),
    "routed_experts_prompt_start": (0,),
    "routed_experts_start_len": (0,),
    "stream_interval": (1,),
    "stream_reasoning": (True,),
}
"""Maps ignored fields to values that cause no warning, in addition to `ALWAYS_NEUTRAL`."""


def is_neutral(value: object, neutral: tuple[Any, ...]) -> bool:
    """Return whether `value` asks for nothing.

    Such a value is in `neutral` or in `ALWAYS_NEUTRAL`, or it is a list with null for each prompt of a batch.
    """
    if isinstance(value, list) and all(one is None for one in value):
        return True
    return any(type(value) is type(one) and value == one for one in (*ALWAYS_NEUTRAL, *neutral))
