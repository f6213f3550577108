"""Parses the decoder layers in a head's configuration: sizes, rotary embedding, activation, sliding window.

Before parsing, `flatten` converts every published dialect of config.json to one flat object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.services.draft.heads.files.mistral_format import from_params
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.json_config import faults_of
from outrider.shared.nn.config.model_config import (
    Activation,
    ConfigReader,
    RopeConfig,
    parse_rope,
    read_head_sizes,
)
from outrider.shared.nn.families.traits import LatentConfig

LAYER_SECTION = "transformer_layer_config"
EAGLE_SECTION = "eagle_config"
MODEL_TYPES = (
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "speculator_model",
    "eagle",
    "eagle3",
)
"""Model types of heads that have Llama's layers."""
LATENT_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""Model types of heads with Llama's layers, but with latent attention instead of K and V."""

PLAIN_ROPES = ("dynamic", "mrope")
"""Kinds of rotary embedding that a head computes like the plain, unscaled kind.

- ``dynamic``: Dynamic NTK raises the base only when a text exceeds ``max_position_embeddings``. Here, the
  base never changes. On longer texts, this lowers the accept length, but it does not affect correctness.
- ``mrope``: Multimodal rotary embedding has three coordinates, which are equal for text.
"""

SERVE_ANOTHER = "serve the target that this head was trained for, or another --draft"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The configuration of a draft head's decoder layers.

    Attributes:
        vocab_size: Size of the target's vocabulary.
        hidden_size, intermediate_size, num_layers, num_heads: Sizes of the layers.
        num_kv_heads, head_dim: Shape of a token's entry in the KV pool. With latent attention, the entry is
            one head. The width of this head is the width of the latent plus the width of the rotated part.
        rotary_dim: Number of rotated dimensions of a head.
        latent: Widths of multi-head latent attention. None for other attention.
        rms_norm_eps: Epsilon of every norm.
        rope: Rotary embedding. Its base defaults to 10000, not to the target's base.
        tie_word_embeddings: True if the head's lm_head and embedding are the same tensor.
        activation: Activation of the MLP.
        sliding_window: Number of positions that a row attends to, including its own position. With None,
            there is no limit.
        fingerprint: Fingerprint of the configuration's content.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    latent: LatentConfig | None
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    activation: Activation
    sliding_window: int | None
    fingerprint: str

    @classmethod
    def parse(cls, reader: ConfigReader) -> HeadConfig:
        """Parse a configuration that `flatten` returned.

        Raises:
            CheckpointError: A key is missing or not supported; `field` names the key.
        """
        with faults_of(reader.source):
            return cls._parse(reader)

    @classmethod
    def _parse(cls, reader: ConfigReader) -> HeadConfig:
        raw = reader.raw
        model_type = reader.text("model_type", "llama")
        if model_type not in MODEL_TYPES + LATENT_MODEL_TYPES:
            known = ", ".join(MODEL_TYPES + LATENT_MODEL_TYPES)
            raise reader.error(
                "model_type", f"{model_type!r} is not supported for draft heads. Supported types: {known}"
            )
        if raw.get("auto_map") and "speculators_model_type" not in raw:
            raise reader.error(
                "auto_map",
                "would run code from the folder, which is never done. Export the head without it",
            )
        if raw.get("swap_h_and_emb"):
            raise reader.error(
                "swap_h_and_emb",
                "true is not supported: the first layer must read the embedding before the feature. "
                "Export the head in this order",
            )
        if raw.get("quantization_config"):
            raise reader.error(
                "quantization_config",
                "quantised heads are not supported; use a bf16, fp16 or fp32 checkpoint",
            )
        hidden_size = reader.positive("hidden_size")
        num_heads = reader.positive("num_attention_heads")
        latent = _latent(reader) if model_type in LATENT_MODEL_TYPES else None
        num_kv_heads, head_dim = (
            read_head_sizes(reader, hidden_size, num_heads)
            if latent is None
            else (1, latent.rank + latent.rope_dim)
        )
        # Configurations of Llama 4 have a separate key for the size of the dense layers.
        inner_key = (
            "intermediate_size_mlp"
            if model_type == "llama4_text" and raw.get("intermediate_size_mlp")
            else "intermediate_size"
        )
        return cls(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.positive(inner_key),
            num_layers=reader.positive("num_hidden_layers", 1),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=head_dim if latent is None else latent.rope_dim,
            latent=latent,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=_rope(reader),
            tie_word_embeddings=reader.flag("tie_word_embeddings", False),
            activation=_activation(reader),
            sliding_window=_sliding_window(reader),
            fingerprint=hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest(),
        )

    def check_vocabulary(self, target: TargetInfo) -> None:
        """Check that the head was made for a vocabulary of the target's size.

        Raises:
            CheckpointError: The head was made for another vocabulary. The message names the key and both
                values.
        """
        if target.vocab_size != self.vocab_size:
            raise CheckpointError(
                f"The head's vocab_size is {self.vocab_size}, but the target's is {target.vocab_size}: "
                f"{SERVE_ANOTHER}.",
                field="vocab_size",
            )


def flatten(raw: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Merge the sections of a head's configuration into one flat object with Hugging Face's keys.

    If sections repeat a key, ``eagle_config`` overrides the top level, which overrides
    ``transformer_layer_config``. A key whose value is null or [] counts as absent.

    Raises:
        CheckpointError: A section is not an object, or `from_params` cannot translate a key in Mistral's
            format.
    """
    with faults_of(source):
        raw = from_params(raw, source)
    sections: dict[str, Mapping[str, Any]] = {}
    for key in (LAYER_SECTION, EAGLE_SECTION):
        section = raw.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise CheckpointError(f"{source}: {key}: must be an object, not {section!r}.", field=key)
        sections[key] = section or {}
    top = {key: value for key, value in raw.items() if key not in sections}
    if sections[LAYER_SECTION]:
        top.pop("model_type", None)  # this is the wrapper's type; the layers have their own type
    flat: dict[str, Any] = {}
    for part in (sections[LAYER_SECTION], top, sections[EAGLE_SECTION]):
        flat |= {key: value for key, value in part.items() if value is not None and value != []}
    if isinstance(flat.get("architectures"), str):
        flat["architectures"] = [flat["architectures"]]
    return flat


def plain_rope(reader: ConfigReader) -> str | None:
    """Return the kind of rotary embedding if the kind is one of `PLAIN_ROPES`, else None."""
    parameters = reader.raw.get(_rope_section(reader))
    name = parameters.get("rope_type", parameters.get("type")) if isinstance(parameters, Mapping) else None
    return name if name in PLAIN_ROPES else None


def _rope(reader: ConfigReader) -> RopeConfig:
    if plain_rope(reader) is None:
        return parse_rope(reader)
    section = _rope_section(reader)
    parameters = {
        key: value for key, value in reader.raw[section].items() if key not in ("rope_type", "type")
    }
    return parse_rope(ConfigReader({**reader.raw, section: parameters}, reader.source))


def _rope_section(reader: ConfigReader) -> str:
    return "rope_parameters" if reader.raw.get("rope_parameters") else "rope_scaling"


def _latent(reader: ConfigReader) -> LatentConfig:
    return LatentConfig(
        rank=reader.positive("kv_lora_rank"),
        query_rank=reader.positive("q_lora_rank") if reader.raw.get("q_lora_rank") is not None else None,
        nope_dim=reader.positive("qk_nope_head_dim"),
        rope_dim=reader.positive("qk_rope_head_dim"),
        value_dim=reader.positive("v_head_dim"),
        interleaved=reader.flag("rope_interleave", True),
    )


def _activation(reader: ConfigReader) -> Activation:
    name = reader.text("hidden_act", Activation.SILU.value)
    try:
        return Activation(name)
    except ValueError:
        supported = ", ".join(activation.value for activation in Activation)
        raise reader.error("hidden_act", f"{name!r} is not supported. Supported: {supported}") from None


def _sliding_window(reader: ConfigReader) -> int | None:
    """Return the size of the sliding window of all layers, or None if there is no window.

    ``layer_types`` must name the same type for all layers, because no known head mixes types.
    """
    raw = reader.raw
    types = raw.get("layer_types")
    if types is not None:
        if (
            not isinstance(types, list)
            or len(set(types)) > 1
            or not set(types) <= {"sliding_attention", "full_attention"}
        ):
            raise reader.error(
                "layer_types",
                f"must be sliding_attention or full_attention, the same for all layers, not {types!r}",
            )
        if "sliding_attention" not in types:
            return None
        return reader.positive("sliding_window")
    # Configurations of Qwen2 contain a window even if the window is switched off.
    if raw.get("sliding_window") is None or not reader.flag("use_sliding_window", True):
        return None
    return reader.positive("sliding_window")
