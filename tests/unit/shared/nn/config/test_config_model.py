"""Parsing of config.json: supported keys, defaults, and errors that name an unsupported key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config.model_config import Activation, ModelConfig, RopeKind
from outrider.shared.nn.open import read_model_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_missing_keys_have_defaults() -> None:
    config = ModelConfig.parse(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope.theta, config.rope.kind) == (10000.0, RopeKind.DEFAULT)
    assert (config.tie_word_embeddings, config.qkv_bias, config.o_bias, config.mlp_bias) == (False,) * 4
    assert config.activation is Activation.SILU
    assert config.eos_token_ids == ()


@pytest.mark.parametrize("layout", ["transformers 4", "transformers 5", "old name"])
def test_llama3_scaling_is_read_from_every_layout(layout: str) -> None:
    raw = {
        "transformers 4": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        "transformers 5": {"rope_parameters": {"rope_theta": 500000.0, **LLAMA3}},
        "old name": {
            "rope_theta": 500000.0,
            "rope_scaling": {"type" if key == "rope_type" else key: LLAMA3[key] for key in LLAMA3},
        },
    }[layout]
    rope = ModelConfig.parse({**BASE, **raw}).rope
    assert (rope.kind, rope.theta, rope.factor) == (RopeKind.LLAMA3, 500000.0, 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (1.0, 4.0, 8192)


def test_a_config_saved_by_transformers_is_read_back(tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True
    ).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (96, 4, 2, 32)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 7}))
    assert read_model_config(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert read_model_config(tmp_path).eos_token_ids == (8, 9)


def test_the_fingerprint_follows_the_content_not_the_order() -> None:
    assert ModelConfig.parse(BASE).fingerprint == ModelConfig.parse(dict(reversed(BASE.items()))).fingerprint
    assert ModelConfig.parse(BASE).fingerprint != ModelConfig.parse({**BASE, "rope_theta": 2e4}).fingerprint


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"hidden_size": None}, "hidden_size", "missing"),
        ({"vocab_size": "100"}, "vocab_size", "positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "positive integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "does not divide"),
        ({"hidden_size": 66}, "head_dim", "not a multiple"),
        ({"head_dim": 15}, "head_dim", "even"),
        ({"model_type": "mamba"}, "model_type", "'mamba' is not supported"),
        ({"hidden_act": "relu"}, "hidden_act", "'relu' is not supported"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps", "positive number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings", "true or false"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type",
            "'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor", "missing"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor", "above"),
        ({"rope_scaling": "linear"}, "rope_scaling", "object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "part of each head"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map", "code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "quantized"),
        ({"eos_token_id": "</s>"}, "eos_token_id", "token id"),
    ],
)
def test_an_unsupported_value_is_refused_by_its_key(change: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        ModelConfig.parse({**BASE, **change}, source="/models/x/config.json")
    assert caught.value.field == field
    assert "/models/x/config.json" in caught.value.message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "does not exist"),
        (b"{", "cannot be read as JSON"),
        (b"[]", "JSON object"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_model_config(tmp_path)
    assert caught.value.field == str(path)
