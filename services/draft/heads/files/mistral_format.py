"""Translates heads in Mistral's own format: ``params.json``, tensor names, paired rotations, FP8 scales.

Sources: the loaders of vLLM (`EagleMistralForCausalLM`, contributed by Mistral) and SGLang
(`MistralForCausalLMEagle`).

Mistral's heads are EAGLE-1/2 heads that consist of complete Mistral layers:

- Layer 0 has an ``attention_norm``, which other EAGLE-1/2 heads lack.
- ``eagle_linear`` (our ``fc``) has no bias.
- A ``norm`` follows the last layer. The output of this norm is both the input of the lm_head and the next
  feature. vLLM applies the norm in this way; SGLang loads the norm but does not apply it.
- The rotary embedding rotates adjacent pairs of dimensions of q and k.
- Each FP8 matrix has one scale.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config.model_config import CONFIG_FILE, read_json

PARAMS_FILE = "params.json"
ARCHITECTURES = ("EagleMistralForCausalLM", "MistralForCausalLMEagle")
FUSION = "eagle_linear.weight"
SCALE = ".qscale_weight"
ACTIVATION_SCALES = re.compile(r"(\.qscale_act|_fake_quantizer\.qscale_act)$")
KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_embeddings": "tie_word_embeddings",
}
YARN_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
MODULES = {
    "eagle_linear": "fc",
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "tok_embeddings": "embed_tokens",
    "output": "lm_head",
}
SPELLINGS = {ours: theirs for theirs, ours in MODULES.items()}


def config_file(folder: Path) -> Path:
    """Return a head's configuration file: ``config.json``, or ``params.json`` if only this file exists."""
    params = folder / PARAMS_FILE
    return params if params.is_file() and not (folder / CONFIG_FILE).is_file() else folder / CONFIG_FILE


def read_head_config(folder: Path) -> dict[str, Any]:
    """Read a head's configuration as stored; `head_config.flatten` later translates the keys.

    Raises:
        CheckpointError: The file is missing or not JSON.
    """
    return read_json(config_file(folder))


def from_params(raw: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Translate a head's configuration from Mistral's keys (``params.json``) to Hugging Face's keys.

    A configuration that already has Hugging Face's keys is returned unchanged.

    Raises:
        CheckpointError: The value of a key requests a feature that is not supported.
    """
    config = dict(raw)
    if "dim" not in config:
        return config
    for key in ("moe", "llama_4_scaling", "vision_encoder", "multimodal", "q_lora_rank", "kv_lora_rank"):
        if config.get(key):
            raise CheckpointError(
                f"{source}: {key}: heads with this key are not supported in Mistral's format. Use another "
                "head.",
                field=key,
            )
    quantised = config.pop("quantization", None)
    if quantised and (not isinstance(quantised, Mapping) or quantised.get("qformat_weight") != "fp8_e4m3"):
        raise CheckpointError(
            f"{source}: quantization: {quantised!r} is not supported. Use a head in fp8_e4m3, or one that "
            "is not quantised.",
            field="quantization",
        )
    for theirs, ours in KEYS.items():
        if theirs in config:
            config[ours] = config.pop(theirs)
    if yarn := config.pop("yarn", None):
        config["rope_parameters"] = _yarn(yarn, source, config.get("rope_theta"))
    if config.get("model_type") in (None, "transformer"):
        config["model_type"] = "mistral"
    return config


def is_native(names: Collection[str]) -> bool:
    """Return whether a file's tensors have Mistral's names."""
    return any(name.removeprefix("model.").endswith((FUSION, ".attention.wq.weight")) for name in names)


def rename(name: str) -> str:
    """Return the canonical name of a tensor. `name` must not begin with ``model.``."""
    return ".".join(MODULES.get(part, part) for part in name.split("."))


def spell(name: str) -> str:
    """Return Mistral's spelling of a canonical name."""
    return ".".join(SPELLINGS.get(part, part) for part in name.split("."))


def halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a q or k matrix, ``[heads * head_dim, columns]``, from rotated pairs to halves."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


def _yarn(section: Any, source: Path | str, theta: Any) -> dict[str, Any]:
    known = {*YARN_KEYS, "apply_scale"}
    if not isinstance(section, Mapping) or not section.keys() <= known:
        raise CheckpointError(
            f"{source}: yarn: must be an object with the keys {', '.join(sorted(known))}, not {section!r}.",
            field="yarn",
        )
    rope: dict[str, Any] = {YARN_KEYS[key]: value for key, value in section.items() if key in YARN_KEYS} | {
        "rope_type": "yarn"
    }
    if section.get("apply_scale") is False:
        rope["attention_factor"] = 1.0
    return rope if theta is None else rope | {"rope_theta": theta}
