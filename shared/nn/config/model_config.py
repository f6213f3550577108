"""Parses a model's `config.json` into `ModelConfig`. Errors name the key that makes a model unsupported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig
from outrider.shared.nn.checkpoint.fp8_source import SCALE_SUFFIX, Block, parse_weight_block
from outrider.shared.nn.checkpoint.json_config import ConfigReader, read_json
from outrider.shared.nn.config.rope_config import DEFAULT_ROPE_THETA, RopeConfig, RopeKind, parse_rope
from outrider.shared.nn.families.registry import Family, find_family
from outrider.shared.nn.families.traits import LatentConfig

__all__ = [
    "CONFIG_FILE",
    "DEFAULT_ROPE_THETA",
    "GENERATION_CONFIG_FILE",
    "Activation",
    "ConfigReader",
    "ModelConfig",
    "RopeConfig",
    "RopeKind",
    "parse_rope",
    "read_json",
]

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


class Activation(Enum):
    """Activation of the gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Configuration of a decoder, read from the config.json of a supported model family.

    Attributes:
        model_type, architecture: The model type and the architecture that config.json names.
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads: Sizes of the model. num_heads times
            the width of a head need not equal hidden_size.
        num_kv_heads, head_dim: Shape of a token's entry in the KV pool. With multi-head latent attention, the
            entry is one head. Its width is the sum of the widths of the latent and of the rotated part.
        rms_norm_eps: Epsilon of every norm.
        rope, rotary_dim: The rotary embedding, and the number of dimensions that it rotates in each head.
        attention_scale: Factor by which the attention scores are multiplied.
        max_position_embeddings: Context length for which the model was trained. The decoder does not enforce
            this limit.
        tie_word_embeddings: True if the output head and the input embedding are the same tensor.
        activation: Activation of the MLP.
        eos_token_ids: EOS token ids from generation_config.json, or from config.json if
            generation_config.json has none. May be empty.
        bos_token_id: BOS token id from config.json, or None.
        dtype: Name of the stored type ("bfloat16"), or None if config.json does not name one.
        fingerprint: Hash of the content of config.json. Equal configurations have equal hashes.
        qkv_bias, o_bias, mlp_bias, head_norm, sinks, experts, latent: Features of the model's family; see
            `Traits`.
        windows, sparse: Features of each layer; see `Traits`. In this class, both tuples always have one
            entry per layer.
        weight_block: Numbers of rows and columns of the blocks that share a scale in an FP8 checkpoint. None
            for other checkpoints.
        ignored: Maps patterns of tensor names to the reason why the decoder does not load these tensors.
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
    rotary_dim: int
    attention_scale: float
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
    head_norm: bool
    windows: tuple[int, ...]
    sinks: bool
    experts: ExpertsConfig | None
    sparse: tuple[bool, ...]
    latent: LatentConfig | None
    weight_block: Block | None
    ignored: Mapping[str, str]

    @property
    def max_positions(self) -> int | None:
        """Number of rows of a learned position table, which limits the text. None for rotary positions."""
        return None

    @classmethod
    def parse(
        cls,
        raw: Mapping[str, Any],
        *,
        source: Path | str = CONFIG_FILE,
        generation: Mapping[str, Any] | None = None,
    ) -> ModelConfig:
        """Parse a configuration from a JSON object, for example from a draft head's config.json.

        Args:
            raw: The JSON object of the configuration.
            source: Name of the file, for error messages.
            generation: Content of generation_config.json, or None without this file.

        Raises:
            CheckpointError: The configuration is incomplete or describes a model that cannot be served. The
                error's `field` is the key that causes the error.
        """
        reader = ConfigReader(raw, source)
        family = find_family(reader)
        num_layers = reader.positive("num_hidden_layers")
        traits = family.traits(reader, num_layers)
        rope = parse_rope(reader, traits.rope_theta)
        heads = _latent_heads(reader, traits.latent) if traits.latent else _heads(reader)
        return cls(
            model_type=family.model_type,
            architecture=str((reader.strings("architectures") or family.architectures)[0]),
            vocab_size=reader.positive("vocab_size"),
            hidden_size=reader.positive("hidden_size"),
            intermediate_size=reader.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=rope,
            rotary_dim=heads.rotary_dim,
            attention_scale=heads.scored_dim**-0.5 * (rope.softmax_factor if traits.latent else 1.0),
            max_position_embeddings=reader.positive("max_position_embeddings", 2048),
            tie_word_embeddings=reader.flag("tie_word_embeddings", False),
            qkv_bias=traits.qkv_bias,
            o_bias=traits.o_bias,
            mlp_bias=traits.mlp_bias,
            activation=_activation(reader),
            eos_token_ids=eos_token_ids(reader, generation or {}),
            bos_token_id=raw.get("bos_token_id"),
            dtype=raw.get("dtype") or raw.get("torch_dtype"),
            fingerprint=hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest(),
            head_norm=traits.head_norm,
            windows=traits.windows or (0,) * num_layers,
            sinks=traits.sinks,
            experts=traits.experts,
            sparse=traits.sparse or (False,) * num_layers,
            latent=traits.latent,
            weight_block=parse_weight_block(reader),
            ignored=_ignored(family, reader, num_layers),
        )


@dataclass(frozen=True, slots=True)
class _Heads:
    """Sizes of the attention heads. The factor on the attention scores is ``scored_dim ** -0.5``."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scored_dim: int


def read_head_sizes(reader: ConfigReader, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """Read the number of K/V heads and the width of each head from a config.json.

    Raises:
        CheckpointError: The sizes are inconsistent. The message names the key in config.json.
    """
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    if reader.raw.get("head_dim") is None and hidden_size % num_heads:
        raise reader.error(
            "head_dim",
            f"is missing, and hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}",
        )
    head_dim = reader.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"must be even for rotary embeddings, not {head_dim}")
    return num_kv_heads, head_dim


def _heads(reader: ConfigReader) -> _Heads:
    num_heads = reader.positive("num_attention_heads")
    num_kv_heads, head_dim = read_head_sizes(reader, reader.positive("hidden_size"), num_heads)
    return _Heads(num_heads, num_kv_heads, head_dim, head_dim, head_dim)


def _latent_heads(reader: ConfigReader, latent: LatentConfig) -> _Heads:
    if latent.rope_dim % 2:
        raise reader.error("qk_rope_head_dim", f"must be even for rotary embeddings, not {latent.rope_dim}")
    cached = latent.rank + latent.rope_dim
    return _Heads(
        reader.positive("num_attention_heads"), 1, cached, latent.rope_dim, latent.nope_dim + latent.rope_dim
    )


def _ignored(family: Family, reader: ConfigReader, num_layers: int) -> dict[str, str]:
    ignored = {"*rotary_emb.inv_freq": "a buffer of old exports, computed from config.json"} | dict(
        family.ignored(reader, num_layers)
    )
    if reader.flag("tie_word_embeddings", False):
        ignored["lm_head.weight"] = "tied: the input embedding is used"
    if parse_weight_block(reader):
        ignored[f"*.weight{SCALE_SUFFIX}"] = "scales, read together with their FP8 matrices"
    return ignored


def _activation(reader: ConfigReader) -> Activation:
    name = reader.text("hidden_act", Activation.SILU.value)
    try:
        return Activation(name)
    except ValueError:
        supported = ", ".join(activation.value for activation in Activation)
        raise reader.error("hidden_act", f"{name!r} is not supported; supported: {supported}") from None


def eos_token_ids(reader: ConfigReader, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the EOS token ids of generation_config.json, or of config.json if that file has none.

    Raises:
        CheckpointError: ``eos_token_id`` is neither a token id nor a list of token ids.
    """
    value = generation.get("eos_token_id", reader.raw.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(
        isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids
    ):
        raise reader.error("eos_token_id", f"must be a token id or a list of them, not {value!r}")
    return tuple(ids)
