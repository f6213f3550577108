"""Reads the config.json of a model that runs through `transformers`, and rejects unsupported models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.config.model_config import Activation
from outrider.shared.nn.config.rope_config import RopeConfig
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.generic.probe import probe

CAUSAL = ("ForCausalLM", "LMHeadModel")
BATCH_DEPENDENT_ROPE = frozenset(("dynamic", "longrope", "su"))
LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))
DEFAULT_CONTEXT = 2048  # used if a model's configuration gives no context length
IGNORED = {"*": "transformers checks the tensors of its models while loading"}


def known(model_type: str) -> bool:
    """True if `transformers` has a causal language model of this type."""
    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING


def find_class(reader: ConfigReader) -> tuple[Any, PreTrainedConfig]:
    """Return the model class in `transformers` for a config.json, and the parsed configuration.

    Raises:
        CheckpointError: The model is of an unsupported kind, or needs code or quantized weights. The error's
            `field` is the key at fault.
    """
    raw, model_type = reader.raw, reader.text("model_type", "")
    if raw.get("auto_map"):
        raise reader.error(
            "auto_map",
            "names code in the model folder, which is never run; "
            f"remove the key if transformers itself can load the weights as {model_type!r}",
        )
    if raw.get("quantization_config"):
        raise reader.error(
            "quantization_config", "quantized weights are not supported; use a bf16, fp16 or fp32 checkpoint"
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(raw))
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except Exception as error:  # Whatever transformers' checks raise, this config.json is the cause.
        raise reader.error(
            "model_type", f"transformers rejects this {model_type!r} configuration: {error}"
        ) from error
    _check_kind(reader, model_class, config)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # only needed for the training loss
    return model_class, config


def parse_generic_config(reader: ConfigReader, eos_token_ids: tuple[int, ...]) -> GenericConfig:
    """Parse the config.json of a model that `transformers` implements, and probe the model's layout.

    Raises:
        CheckpointError: The model is not supported (see `find_class`), or the probe rejects the model.
    """
    model_class, config = find_class(reader)
    layout = probe(model_class, config, reader.error)
    return GenericConfig(
        model_type=reader.text("model_type", ""),
        architecture=layout.class_name,
        vocab_size=int(config.vocab_size),
        hidden_size=layout.hidden_size,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * layout.hidden_size),
        num_layers=len(layout.windows),
        num_heads=layout.num_heads,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        rms_norm_eps=float(
            getattr(config, "rms_norm_eps", None) or 1e-6
        ),  # null for some families with LayerNorm
        rope=_rope(config),
        rotary_dim=layout.head_dim,
        attention_scale=layout.head_dim**-0.5,
        max_position_embeddings=int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        activation=Activation.SILU,
        eos_token_ids=eos_token_ids,
        bos_token_id=config.bos_token_id,
        dtype=reader.raw.get("dtype") or reader.raw.get("torch_dtype"),
        fingerprint=hashlib.sha256(json.dumps(reader.raw, sort_keys=True, default=str).encode()).hexdigest(),
        head_norm=False,
        windows=layout.windows,
        sinks=False,
        experts=None,
        sparse=(False,) * len(layout.windows),
        latent=None,
        weight_block=None,
        ignored=IGNORED,
        layout=layout,
    )


def _rope(config: PreTrainedConfig) -> RopeConfig:
    """Return a configuration with only theta, because only theta is compared with the draft's parameters."""
    parameters = getattr(config, "rope_parameters", None)
    theta = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    return RopeConfig(theta=float(theta)) if theta else RopeConfig()


def _check_kind(reader: ConfigReader, model_class: Any, config: PreTrainedConfig) -> None:
    name = model_class.__name__
    if getattr(config, "is_encoder_decoder", False):
        raise reader.error("model_type", f"{name} is an encoder-decoder model, and targets must be decoders")
    if not name.endswith(CAUSAL) or config.get_text_config() is not config:
        raise reader.error("model_type", f"{name} is multimodal; use a checkpoint of its text model alone")
    if getattr(config, "alibi", False):
        raise reader.error(
            "alibi",
            f"{name} biases its scores by distance, which is not supported; "
            "use a model with rotary positions",
        )
    names = reader.strings("architectures")
    if names and name not in names:
        raise reader.error("architectures", f"{names[0]!r} is not a target model; use a checkpoint of {name}")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if others:
        raise reader.error(
            "layer_types",
            f"layers of kind {others[0]!r} are not supported; supported: sliding_attention, full_attention",
        )
    moving = next(
        (
            kind
            for kind in _rope_types(getattr(config, "rope_parameters", None))
            if kind in BATCH_DEPENDENT_ROPE
        ),
        None,
    )
    if moving is not None:
        raise reader.error(
            "rope_parameters",
            f"rope_type {moving!r} depends on the longest sequence in a batch, so cached keys would be "
            "wrong; use a checkpoint without it",
        )


def _rope_types(parameters: object) -> Iterator[str]:
    """Yield every rope_type. A file may have one set of parameters, or one set for each kind of layer."""
    if isinstance(parameters, Mapping):
        for key, value in parameters.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _rope_types(value)
