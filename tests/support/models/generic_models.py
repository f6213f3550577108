"""Tiny random models that run through `transformers` (no file in `families`), and models that are refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from support.models.family_models import logits_of, save_once

VOCAB, LAYERS, WINDOW = 97, 3, 24
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GPT2_SIZES = {"n_positions": 128, "n_embd": 64, "n_head": 4, "n_layer": LAYERS}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2}

# Case → (prefix of the class name, configuration in addition to the common settings).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": (
        "Gemma2",
        {
            "attn_logit_softcapping": 1.5,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma2-uncapped": (
        "Gemma2",
        {
            "attn_logit_softcapping": None,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": WINDOW, "layer_types": MIXED}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", GPT2_SIZES),
    "gpt-bigcode": ("GPTBigCode", GPT2_SIZES),
    "olmo": ("Olmo", {"clip_qkv": 1.0}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "olmoe": ("Olmoe", EXPERTS),
    "cohere": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("Cohere2", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "granite": (
        "Granite",
        {
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.0,
        },
    ),
    "granite-moe": ("GraniteMoe", {"num_local_experts": 4}),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-moe": ("Glm4Moe", {"head_dim": 16, "n_routed_experts": 6, **EXPERTS, "first_k_dense_replace": 1}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
    "ernie4.5": ("Ernie4_5", {"head_dim": 16}),
    "exaone4": ("Exaone4", {"sliding_window": WINDOW, "layer_types": MIXED}),
    "nemotron": ("Nemotron", {"head_dim": 16}),
    "persimmon": ("Persimmon", {}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "helium": ("Helium", {"head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 16}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
    "nanochat": ("NanoChat", {}),
    "arcee": ("Arcee", {}),
    "minicpm3": (
        "MiniCPM3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
        },
    ),
}
WINDOWED = [case for case, (_, overrides) in CASES.items() if "sliding_window" in overrides]

# Each entry: prefix of the class name, overrides, the field at fault, and a part of the message.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "gemma3-bidirectional": (
        "Gemma3",
        {"head_dim": 16, "use_bidirectional_attention": True},
        "is_causal",
        "looks ahead",
    ),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE},
        "rope_parameters",
        "longest sequence in a batch",
    ),
    "gptj": ("GPTJ", GPT2_SIZES, "model_type", "does not use the attention interface"),
    "falcon": (
        "Falcon",
        {"new_decoder_architecture": True},
        "model_type",
        "does not use the attention interface",
    ),
    "falcon-alibi": ("Falcon", {"alibi": True}, "alibi", "by distance"),
    "bloom": ("Bloom", {}, "model_type", "takes no explicit positions"),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}, "model_type", "takes no explicit positions"),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, "model_type", "cannot be run apart"),
    "doge": ("Doge", {}, "model_type", "computes with its attention mask"),
    "diffllama": ("DiffLlama", {}, "model_type", "calls the attention interface 6 times"),
    "llama4": (
        "Llama4",
        {"head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2},
        "layer_types",
        "'chunked_attention'",
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "model_type", "linear-attention"),
    "mamba": ("Mamba", {}, "model_type", "linear-attention"),
}


def make(name: str, overrides: dict[str, Any]) -> Any:
    """Return a random model of a transformers class with eager attention. Norms and biases are random too."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        **overrides,
    }
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(
        transformers, f"{name}LMHeadModel"
    )
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = model_class._from_config(config_class(**settings), attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@functools.cache
def reference(case: str) -> Any:
    """Return the model of a case."""
    return make(*CASES[case])


def save(case: str, folder: Path) -> Path:
    """Save the checkpoint of a case into `folder`, unless it is saved already, and return its path."""
    return save_once(folder / case, lambda: reference(case))


def reference_logits(case: str, tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits of transformers' model, ``[len(tokens), vocab]``."""
    return logits_of(reference(case), tokens)
