"""What every head's configuration says of its decoder layers, whatever the dialect of the file."""

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
"""What the heads of these families call themselves; the layers of all of them are Llama's."""
LATENT_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""The attention of these keeps a latent instead of K and V; the rest of their layers is Llama's too."""

PLAIN_ROPES = ("dynamic", "mrope")
"""Kinds of rotary embedding that are the plain one where heads draft.

Dynamic NTK raises the base only once a text exceeds ``max_position_embeddings``; in the official EAGLE code with each further token, while
what is cached keeps the base that it was written with. Here the base stays, as in heads without scaling beyond the positions that they were
trained on: it costs accept length there, never correctness. The three coordinates of multimodal rotary embedding are one in text.
"""

SERVE_ANOTHER = "serve the target that this head was trained for, or another --draft"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The decoder layers of a head.

    Attributes:
        vocab_size: The target's vocabulary.
        hidden_size, intermediate_size, num_layers, num_heads: Sizes.
        num_kv_heads, head_dim: Of what the pool keeps per token: with a latent, one head as wide as the latent and its rotated part.
        rotary_dim: How many dimensions of a head are rotated.
        latent: Widths of multi-head latent attention, or None.
        rms_norm_eps: Epsilon of every norm.
        rope: Rotary embedding; a file without a base means 10000, not the target's.
        tie_word_embeddings: The head's lm_head is its embedding.
        activation: Of the MLP.
        sliding_window: A row sees that many positions, its own included; None = all.
        fingerprint: Of the file's content.
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
        """Parse a configuration that `flatten` made.

        Raises:
            CheckpointError: something is missing or not supported; `field` names the key.
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
                "model_type", f"{model_type!r} is not that of a known draft head; known: {known}"
            )
        if raw.get("auto_map") and "speculators_model_type" not in raw:
            raise reader.error(
                "auto_map",
                "asks to run code from the folder, which is never done; export the head without it",
            )
        if raw.get("swap_h_and_emb"):
            raise reader.error(
                "swap_h_and_emb",
                "true is not supported: the first layer reads the embedding first; export the head so",
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
        # Llama 4's dense layers are sized by a key of their own.
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
        """Raise `CheckpointError` when the head was made for another vocabulary; names the key and both values."""
        if target.vocab_size != self.vocab_size:
            raise CheckpointError(
                f"The head's vocab_size is {self.vocab_size}, the target's {target.vocab_size}: {SERVE_ANOTHER}.",
                field="vocab_size",
            )


def flatten(raw: Mapping[str, Any], source: Path | str) -> dict[str, Any]:
    """Merge the dialects into one flat object: nested layer config < top level < eagle_config; null and [] count as absent.

    Raises:
        CheckpointError: a section is no object, or `from_params` cannot say a key of Mistral's.
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
        top.pop("model_type", None)  # of the wrapper; the layers have their own
    flat: dict[str, Any] = {}
    for part in (sections[LAYER_SECTION], top, sections[EAGLE_SECTION]):
        flat |= {key: value for key, value in part.items() if value is not None and value != []}
    if isinstance(flat.get("architectures"), str):
        flat["architectures"] = [flat["architectures"]]
    return flat


def plain_rope(reader: ConfigReader) -> str | None:
    """Return the name of a rotary embedding that is taken for the plain one (`PLAIN_ROPES`), or None."""
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
        raise reader.error("hidden_act", f"{name!r} is not supported; supported: {supported}") from None


def _sliding_window(reader: ConfigReader) -> int | None:
    """Return the window of all layers. ``layer_types`` must agree: a mixture would need a window per layer, which no head has."""
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
                f"must name one type for all layers, sliding_attention or full_attention, not {types!r}",
            )
        if "sliding_attention" not in types:
            return None
        return reader.positive("sliding_window")
    # Qwen2's configurations carry a window that is switched off.
    if raw.get("sliding_window") is None or not reader.flag("use_sliding_window", True):
        return None
    return reader.positive("sliding_window")
