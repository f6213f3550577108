"""`config.json` of a model folder, parsed into what the decoder needs, and refused by name where it cannot be served."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import CheckpointError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
SUPPORTED_MODEL_TYPES = ("llama",)
DEFAULT_ROPE_THETA = 10000.0  # what a config without rope_theta means


class Activation(Enum):
    """Activation of the gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class RopeKind(Enum):
    """How rotary frequencies are scaled."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters.

    Attributes:
        theta: Base of the frequencies.
        kind: Scaling rule.
        factor: Frequencies are divided by it (all of them: linear; the low ones: llama3).
        low_freq_factor, high_freq_factor, original_max_position: llama3: wavelengths above original / low are scaled in full, below
            original / high not at all, in between smoothly.
    """

    theta: float = DEFAULT_ROPE_THETA
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder.

    Attributes:
        model_type, architecture: As the file says.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: Sizes. heads * head_dim need not be
            hidden_size.
        rms_norm_eps: Epsilon of every norm.
        rope: Rotary embedding.
        max_position_embeddings: The context that the model was trained for; not a limit of the decoder.
        tie_word_embeddings: The output head is the input embedding.
        qkv_bias, o_bias, mlp_bias: Which projections carry a bias.
        activation: Of the MLP.
        eos_token_ids: From generation_config.json, else config.json; may be empty.
        bos_token_id: Or None.
        dtype: Name of the stored type ("bfloat16"), or None when the file does not say.
        fingerprint: Of the file's content: equal for equal configurations.
    """

    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: Activation
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None
    fingerprint: str

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face model folder.

        Raises:
            CheckpointError: The folder or file is missing, not JSON, or describes a model that cannot be served; `field` names it.
        """
        folder = Path(path)
        raw = read_json(folder / CONFIG_FILE)
        generation = read_json(folder / GENERATION_CONFIG_FILE) if (folder / GENERATION_CONFIG_FILE).is_file() else {}
        return cls.parse(raw, source=folder / CONFIG_FILE, generation=generation)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, source: Path | str = CONFIG_FILE, generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Parse a configuration that is already read (draft heads nest theirs). `source` is named in errors.

        Raises:
            CheckpointError: As `from_dir`.
        """
        reader = ConfigReader(raw, source)
        model_type = reader.text("model_type", "llama")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise reader.error(
                "model_type", f"{model_type!r} is not supported; serve a model of one of these types: {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        if raw.get("auto_map"):
            raise reader.error("auto_map", "asks to run code from the model folder, which is never done; use a checkpoint without it")
        if raw.get("quantization_config"):
            raise reader.error("quantization_config", "quantised weights are not supported; use a bf16, fp16 or fp32 checkpoint")
        hidden_size = reader.positive("hidden_size")
        num_heads = reader.positive("num_attention_heads")
        num_kv_heads = reader.positive("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise reader.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
        if raw.get("head_dim") is None and hidden_size % num_heads:
            raise reader.error("head_dim", f"is missing, and hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
        head_dim = reader.positive("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise reader.error("head_dim", f"must be even for rotary embeddings, not {head_dim}")
        attention_bias = reader.flag("attention_bias", False)
        return cls(
            model_type=model_type,
            architecture=_architecture(raw),
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=reader.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=parse_rope(reader),
            max_position_embeddings=reader.positive("max_position_embeddings", 2048),
            tie_word_embeddings=reader.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            mlp_bias=reader.flag("mlp_bias", False),
            activation=_activation(reader),
            eos_token_ids=_eos_token_ids(reader, generation or {}),
            bos_token_id=raw.get("bos_token_id"),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
            fingerprint=hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest(),
        )


class ConfigReader:
    """Typed access to a JSON object, with errors that name the key and the file."""

    def __init__(self, raw: Mapping[str, Any], source: Path | str) -> None:
        self.raw = raw
        self.source = source

    def error(self, key: str, problem: str) -> CheckpointError:
        """Return the error that says what is wrong with `key`."""
        return CheckpointError(f"{self.source}: {key}: {problem}.", field=key)

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer ≥ 1; null counts as absent. Without a default the key is required."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing; the folder must hold the config.json that belongs to the weights")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number > 0."""
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: The file is missing, unreadable or not a JSON object; `field` is the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "is the path right?" if not path.parent.is_dir() else "give a Hugging Face model folder"
        raise CheckpointError(f"{path} does not exist: {hint}", field=str(path)) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download the file again.", field=str(path)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}.", field=str(path))
    return value


def parse_rope(reader: ConfigReader) -> RopeConfig:
    """Parse ``rope_parameters`` (transformers 5) or ``rope_theta`` + ``rope_scaling``.

    Raises:
        CheckpointError: A scaling rule that is not supported, or a number that is missing.
    """
    raw = reader.raw
    section = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    parameters = raw.get(section) or {}
    if not isinstance(parameters, Mapping):
        raise reader.error(section, f"must be an object, not {parameters!r}")
    inner = ConfigReader(parameters, f"{reader.source}: {section}")
    theta = inner.number("rope_theta", reader.number("rope_theta", DEFAULT_ROPE_THETA))
    if float(raw.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise reader.error("partial_rotary_factor", "rotating a part of each head is not supported")
    name = inner.text("rope_type", inner.text("type", RopeKind.DEFAULT.value))
    try:
        kind = RopeKind(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in RopeKind)
        raise inner.error("rope_type", f"{name!r} is not supported; supported: {supported}") from None
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta=theta)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta=theta, kind=kind, factor=inner.number("factor"))
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.error("high_freq_factor", f"{high} must be above low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=inner.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=inner.positive("original_max_position_embeddings"),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or ["LlamaForCausalLM"]
    return str(names[0])


def _activation(reader: ConfigReader) -> Activation:
    name = reader.text("hidden_act", Activation.SILU.value)
    try:
        return Activation(name)
    except ValueError:
        supported = ", ".join(activation.value for activation in Activation)
        raise reader.error("hidden_act", f"{name!r} is not supported; supported: {supported}") from None


def _eos_token_ids(reader: ConfigReader, generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id", reader.raw.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise reader.error("eos_token_id", f"must be a token id or a list of them, not {value!r}")
    return tuple(ids)
