"""Selects the family that reads a config.json. Rejects unsupported models, custom code and quantization."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.families.base import Family
from outrider.shared.nn.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2
from outrider.shared.nn.families.gpt_oss import GPT_OSS
from outrider.shared.nn.families.llama import LLAMA
from outrider.shared.nn.families.mistral import MISTRAL, MIXTRAL
from outrider.shared.nn.families.qwen import MIMO, QWEN2, QWEN3, QWEN3_MOE

__all__ = [
    "FAMILIES",
    "MODEL_TYPES",
    "Family",
    "check_architecture",
    "find_family",
    "may_use_transformers",
    "unsupported_reason",
]

FAMILIES = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    MIMO,
    GPT_OSS,
    DEEPSEEK_V2,
    KIMI_K2,
    DEEPSEEK_V3,
)
MODEL_TYPES = tuple(family.model_type for family in FAMILIES)

_BY_TYPE = {family.model_type: family for family in FAMILIES}
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}

RECURRENT = frozenset(
    (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
        "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "rwkv7", "xlstm",
        "zamba", "zamba2",
    )
)  # fmt: skip
ENCODER_DECODER = frozenset(
    (
        "bart", "bigbird_pegasus", "blenderbot", "led", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus",
        "prophetnet", "seamless_m4t", "switch_transformers", "t5", "t5gemma", "t5gemma2", "umt5", "whisper",
    )
)  # fmt: skip
ENCODERS = frozenset(
    (
        "albert",
        "bert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "modernbert",
        "roberta",
        "xlm-roberta",
    )
)


def find_family(reader: ConfigReader) -> Family:
    """Return the family that a config.json names by its `model_type`, or else by its `architectures`.

    A config.json that has neither key is read as Llama.

    Raises:
        CheckpointError: No family reads this model, or the model needs unsupported code or unsupported
            quantized weights.
    """
    family = _named(reader)
    modules = _auto_map_modules(reader)
    if family is None:
        raise reader.error(
            "model_type", f"{_model_type(reader)!r} is not supported{unsupported_reason(reader)}"
        )
    if not modules <= set(family.bundled_code):
        raise reader.error(
            "auto_map",
            "names code in the model folder, which is never run; use a checkpoint without it",
        )
    _check_quantisation(reader, family)
    return family


def check_architecture(reader: ConfigReader) -> None:
    """Reject a config.json unless one of its `architectures` is a decoder with an output head.

    For example, classifiers and draft heads are rejected.

    Raises:
        CheckpointError: No architecture is such a decoder. The error's `field` is ``architectures``.
    """
    names, family = reader.strings("architectures"), _named(reader)
    if names and family is not None and not set(names) & set(family.architectures):
        raise reader.error(
            "architectures",
            f"{names[0]!r} is not a target model of type {family.model_type}; "
            f"use a checkpoint of {family.architectures[0]}",
        )


def may_use_transformers(reader: ConfigReader) -> bool:
    """True if no family reads the model, and its type is not one that is known to be unsupported."""
    model_type = reader.raw.get("model_type")
    kinds = RECURRENT | ENCODER_DECODER | ENCODERS
    if not isinstance(model_type, str) or reader.raw.get("is_encoder_decoder"):
        return False
    return model_type not in _BY_TYPE and model_type not in kinds


def unsupported_reason(reader: ConfigReader) -> str:
    """Return text that follows "… is not supported": why no family reads this model, and the fix."""
    model_type = _model_type(reader)
    supported = f"serve a model of one of these types: {', '.join(MODEL_TYPES)}"
    kinds = set(reader.strings("layer_types") or ())
    if reader.raw.get("is_encoder_decoder") or model_type in ENCODER_DECODER:
        return f": it is an encoder-decoder model, and targets must be decoders; {supported}"
    if model_type in RECURRENT or "linear_attention" in kinds:
        return (
            ": the state of its linear-attention (recurrent) layers cannot be verified as a tree; "
            f"{supported}"
        )
    if model_type in ENCODERS:
        return f": it is an encoder, which generates no text; {supported}"
    if reader.raw.get("auto_map"):
        return f", and the code that auto_map names is never run; {supported}"
    return f"; {supported}"


def _named(reader: ConfigReader) -> Family | None:
    if reader.raw.get("model_type") is not None:
        return _BY_TYPE.get(reader.text("model_type", ""))
    names = reader.strings("architectures")
    if not names:
        return LLAMA
    return next((_BY_ARCHITECTURE[name] for name in names if name in _BY_ARCHITECTURE), None)


def _model_type(reader: ConfigReader) -> str:
    names = reader.strings("architectures") or ("",)
    return reader.text("model_type", names[0])


def _auto_map_modules(reader: ConfigReader) -> set[str]:
    """Return the modules in ``auto_map``: ``configuration_mimo`` for ``configuration_mimo.MiMoConfig``."""
    entries = reader.raw.get("auto_map")
    if not entries:
        return set()
    if not isinstance(entries, Mapping) or not all(isinstance(value, str) for value in entries.values()):
        raise reader.error("auto_map", f"must map class names to code, not {entries!r}")
    return {value.rpartition(".")[0] for value in entries.values()}


def _check_quantisation(reader: ConfigReader, family: Family) -> None:
    section = reader.raw.get("quantization_config")
    if not section or _covers_cache_only(section):
        return
    method = section.get("quant_method") if isinstance(section, Mapping) else section
    if method not in family.quantisations:
        raise reader.error(
            "quantization_config",
            f"quantized weights ({method}) are not supported; use a bf16, fp16 or fp32 checkpoint",
        )


def _covers_cache_only(section: object) -> bool:
    """True if the quantization section only describes scales of the KV cache, not of the weights."""
    if not isinstance(section, Mapping) or not isinstance(section.get("kv_cache_scheme"), Mapping):
        return False
    of_weights = {"compressed-tensors": "config_groups", "modelopt": "quant_algo"}
    method = section.get("quant_method")
    return method in of_weights and not section.get(of_weights[method])
