"""Named model shapes: configurations without weights, each with a configuration of an EAGLE-3 head.

Most shapes are those of published models and of their public heads. Tiny shapes of target and head are for
automatic tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.generic.choose import read_generic

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DRAFT_VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class NamedShape:
    """A target and a matching EAGLE-3 head, as the contents of two config.json files."""

    name: str
    target: Mapping[str, Any]
    head: Mapping[str, Any]

    def model_config(self) -> ModelConfig:
        """Return the target's configuration.

        Raises:
            CheckpointError: The target needs `transformers`, which is not installed.
        """
        source = f"--shape {self.name}"
        return read_generic(ConfigReader(self.target, source), ()) or ModelConfig.parse(
            self.target, source=source
        )


def named_shape(name: str) -> NamedShape:
    """Return a shape by its name.

    Raises:
        ConfigurationError: There is no such shape. The message lists all names.
    """
    if name not in SHAPES:
        raise ConfigurationError(
            f"--shape {name}: unknown shape. Known shapes: {', '.join(SHAPES)}.", field="--shape"
        )
    return SHAPES[name]


def _llama(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int = 128_256,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        **more,
    }


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    family = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    }
    more = {**family, "max_position_embeddings": 40_960, **more}
    return _llama(hidden, intermediate, layers, heads, 8, 128, 151_936, **more)


def _granite(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> dict[str, Any]:
    """Return the configuration of a model that runs on the modules of `transformers`."""
    scales = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 64,
        "logits_scaling": 8.0,
    }
    family = {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "rope_theta": 5_000_000.0,
        "tie_word_embeddings": True,
    }
    return _llama(
        hidden, intermediate, layers, heads, kv_heads, hidden // heads, vocab, **{**family, **scales, **more}
    )


def _shape(name: str, target: dict[str, Any], draft_vocab: int = DRAFT_VOCAB, **head: Any) -> NamedShape:
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab,
    }
    layer = {
        key: value for key, value in target.items() if key not in ("tie_word_embeddings", "attention_bias")
    }
    return NamedShape(name, target, layer | own | head)


SHAPES: Mapping[str, NamedShape] = {
    shape.name: shape
    for shape in (
        _shape(
            "llama3.1-8b", _llama(4096, 14_336, 32, 32, 8, 128, rope_scaling={**LLAMA3_ROPE, "factor": 8.0})
        ),
        _shape(
            "llama3.2-1b",
            _llama(
                2048,
                8192,
                16,
                32,
                8,
                64,
                tie_word_embeddings=True,
                rope_scaling={**LLAMA3_ROPE, "factor": 32.0},
            ),
        ),
        _shape(
            "llama3.2-3b",
            _llama(
                3072,
                8192,
                28,
                24,
                8,
                128,
                tie_word_embeddings=True,
                rope_scaling={**LLAMA3_ROPE, "factor": 32.0},
            ),
        ),
        _shape(
            "llama3.3-70b", _llama(8192, 28_672, 80, 64, 8, 128, rope_scaling={**LLAMA3_ROPE, "factor": 8.0})
        ),
        _shape("qwen3-8b", _qwen3(4096, 12_288, 36, 32)),
        _shape("qwen3-1.7b", _qwen3(2048, 6144, 28, 16, tie_word_embeddings=True)),
        _shape("granite-3.1-2b", _granite(2048, 8192, 40, 32, 8, 49_155)),
        _shape("granite-tiny", _granite(64, 96, 8, 4, 2, 256, max_position_embeddings=1024), draft_vocab=128),
        _shape("tiny", _llama(64, 96, 8, 4, 2, 16, vocab=256, max_position_embeddings=1024), draft_vocab=128),
    )
}
