"""Writes the config.json of a converted draft head, in Outrider's or the official EAGLE code's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.services.draft.heads.files.eagle3_config import AUX_KEY, Eagle3Config
from outrider.services.draft.heads.files.head_config import HeadConfig, flatten, plain_rope
from outrider.services.draft.heads.files.hot_vocab import HOT_IDS, HOT_SIZE
from outrider.services.draft.heads.registry import HeadKind
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config.model_config import ConfigReader, RopeKind

ARCHITECTURES = {HeadKind.EAGLE: "LlamaForCausalLMEagle", HeadKind.EAGLE3: "LlamaForCausalLMEagle3"}
MISTRAL_ARCHITECTURE = "MistralForCausalLMEagle"
"""Architecture of EAGLE heads whose first layer has an input norm, and whose last layer is followed by a
norm."""
OFFICIAL_ARCHITECTURE = "LlamaForCausalLM"
EAGLE_SECTION_KEYS = (AUX_KEY, "use_aux_hidden_state")
"""Keys that other servers expect inside ``eagle_config``."""
WRAPPER_KEYS = (
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "auto_map",
    "intermediate_size_mlp",
    "transformers_version",
)
OFFICIAL_ROPES = (RopeKind.DEFAULT, RopeKind.LINEAR)


def outrider_config(
    raw: Mapping[str, Any], source: Path, kind: HeadKind, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return a flat config.json, in Outrider's layout, with the same content as a head's own config.json.

    The ids of the aux layers are stored in the section ``eagle_config``, because SGLang reads them there too.
    """
    flat = flatten(raw, source)
    layer = HeadConfig.parse(ConfigReader(flat, source))
    config = {key: value for key, value in flat.items() if key not in (*WRAPPER_KEYS, *EAGLE_SECTION_KEYS)}
    config |= {"num_hidden_layers": layer.num_layers, "intermediate_size": layer.intermediate_size}
    # With latent attention, the model_type defines how layers attend, and the sizes have other keys.
    if layer.latent is None:
        is_mistral = kind is HeadKind.EAGLE and "norm.weight" in tensors
        config |= {
            "architectures": [MISTRAL_ARCHITECTURE if is_mistral else ARCHITECTURES[kind]],
            "model_type": "llama",
        }
        config |= {"head_dim": layer.head_dim, "num_key_value_heads": layer.num_kv_heads}
    section = {key: flat[key] for key in EAGLE_SECTION_KEYS if key in flat}
    if section:
        config["eagle_config"] = section
    if kind is HeadKind.EAGLE3:
        config |= _draft_vocabulary(raw, tensors)
    return config


def eagle_config(
    raw: Mapping[str, Any], source: Path, kind: HeadKind, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return the config.json of a head in the format that the official EAGLE code reads.

    Raises:
        CheckpointError: The official code would ignore a feature that this head needs. The message names the
            key in config.json.
    """
    flat = flatten(raw, source)
    layer = HeadConfig.parse(ConfigReader(flat, source))
    # 1. Refuse heads that the published layout cannot describe.
    if layer.latent is not None:
        raise _unsupported("model_type", f"{flat['model_type']} uses latent attention")
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        raise _unsupported(
            "head_dim", f"{layer.head_dim} x {layer.num_heads} heads is not hidden_size {layer.hidden_size}"
        )
    if layer.rope.kind not in OFFICIAL_ROPES:
        raise _unsupported(
            "rope_scaling",
            f"{layer.rope.kind.value} is not one of {', '.join(rope.value for rope in OFFICIAL_ROPES)}",
        )
    if layer.sliding_window is not None:
        raise _unsupported("sliding_window", f"a window of {layer.sliding_window}")
    head_norm = next((name for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))), None)
    foreign = head_norm or ("norm.weight" if kind is HeadKind.EAGLE and "norm.weight" in tensors else None)
    homeless = (HOT_IDS, "layers.0.input_layernorm.weight") if kind is HeadKind.EAGLE else (HOT_IDS,)
    foreign = foreign or next((name for name in homeless if name in tensors), None)
    if foreign is not None:
        raise _unsupported(foreign, "this layout has no such tensor")
    # 2. Write the keys that EAGLE and EAGLE-3 share.
    config: dict[str, Any] = {
        "architectures": [OFFICIAL_ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": layer.activation.value,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "num_hidden_layers": layer.num_layers,
        "vocab_size": layer.vocab_size,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": layer.rope.theta,
        "rope_scaling": _official_scaling(ConfigReader(flat, source), layer),
        "max_position_embeddings": flat.get("max_position_embeddings", 2048),
        "tie_word_embeddings": False,
        "torch_dtype": str(tensors["layers.0.mlp.down_proj.weight"].dtype).removeprefix("torch."),
    }
    config |= {key: flat[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in flat}
    # 3. Add the keys of the kind.
    if kind is HeadKind.EAGLE:
        return config | {
            "bias": "fc.bias" in tensors,
            "qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        }
    _check_official_eagle3(raw, source, tensors)
    if "target_hidden_size" in flat:
        config["target_hidden_size"] = flat["target_hidden_size"]
    return config | _draft_vocabulary(raw, tensors)


def _official_scaling(reader: ConfigReader, layer: HeadConfig) -> dict[str, Any] | None:
    if plain_rope(reader) == "dynamic":
        return {
            "type": "dynamic",
            "factor": (reader.raw.get("rope_parameters") or reader.raw["rope_scaling"]).get("factor", 1.0),
        }
    return {"type": "linear", "factor": layer.rope.factor} if layer.rope.kind is RopeKind.LINEAR else None


def _check_official_eagle3(raw: Mapping[str, Any], source: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse features that the official code would silently drop or compute differently."""
    config = Eagle3Config.parse(raw, source)
    if config.layer.num_layers > 1:
        raise _unsupported("num_hidden_layers", f"{config.layer.num_layers} layers instead of 1")
    for key, wanted in (
        ("norm_output", config.norm_output),
        ("norm_before_residual", config.norm_before_residual),
    ):
        if wanted:
            raise _unsupported(key, "true")
    if config.final_hidden:
        raise _unsupported("use_aux_hidden_state", "false")
    if config.layer.tie_word_embeddings and "lm_head.weight" not in tensors:
        raise _unsupported("tie_word_embeddings", "true")
    extra = next(
        (name for name in tensors if name.startswith(("fc_norm.", "input_norm.")) or name.endswith(".bias")),
        None,
    )
    if extra is not None:
        raise _unsupported(extra, "this layout has no such tensor")
    if "lm_head.weight" not in tensors:
        raise _unsupported("lm_head.weight", "missing, because the head uses the target's")
        # The official code reads no layer ids. It always derives three ids from the number of target layers.
    ids = config.aux.ids
    if ids is not None:
        layers = ids[-1] + 4
        if ids != (1, layers // 2 - 1, layers - 4):
            raise _unsupported(AUX_KEY, f"{list(ids)} is not the default triple of any target")
    elif config.aux.count != 3:
        raise _unsupported("num_aux_hidden_states", f"{config.aux.count} instead of 3")


def _draft_vocabulary(raw: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return ``draft_vocab_size`` as in the tensors. Keep null, which selects the target's lm_head."""
    if HOT_IDS in tensors and "d2t" not in tensors:
        return {HOT_SIZE: tensors[HOT_IDS].shape[0]}
    if "d2t" in tensors:
        return {"draft_vocab_size": tensors["d2t"].shape[0]}
    if "lm_head.weight" in tensors:
        return {"draft_vocab_size": tensors["lm_head.weight"].shape[0]}
    return {"draft_vocab_size": raw["draft_vocab_size"]} if "draft_vocab_size" in raw else {}


def _unsupported(key: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: {what}. The official EAGLE layout does not support this; its code would compute something "
        "else. Use --to outrider.",
        field=key,
    )
