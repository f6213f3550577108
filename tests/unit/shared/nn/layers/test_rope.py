"""Rotary embedding equals the one in transformers and the definition."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.shared.nn.config.model_config import RopeConfig, RopeKind
from outrider.shared.nn.layers.rope import RotaryEmbedding, rotate

CASES = {
    RopeKind.DEFAULT: RopeConfig(theta=10000.0),
    RopeKind.LINEAR: RopeConfig(theta=10000.0, kind=RopeKind.LINEAR, factor=4.0),
    RopeKind.LLAMA3: RopeConfig(5e5, RopeKind.LLAMA3, 8.0, 1.0, 4.0, 64),
    RopeKind.YARN: RopeConfig(
        5e3, RopeKind.YARN, 8.0, original_max_position=64, attention_factor=0.1 * math.log(8.0) + 1.0
    ),
}


@pytest.mark.parametrize("kind", list(RopeKind))
@pytest.mark.parametrize("head_dim", [16, 64])
def test_rotations_equal_transformers(kind: RopeKind, head_dim: int) -> None:
    rope = CASES[kind]
    parameters = {"rope_type": kind.value, "rope_theta": rope.theta}
    if kind is not RopeKind.DEFAULT:
        parameters["factor"] = rope.factor
    if kind is RopeKind.LLAMA3:
        parameters |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    if kind is RopeKind.YARN:
        parameters["original_max_position_embeddings"] = 64
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=parameters
    )
    positions = torch.tensor(
        [0, 1, 5, 5, 130, 4097]
    )  # beyond the context of the config, out of order, repeated
    heads = torch.randn(6, 3, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    want, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cos, sin)
    rotate(heads, RotaryEmbedding(rope, head_dim, "cpu", torch.float32)(positions))
    torch.testing.assert_close(heads, want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_scores_depend_on_the_distance_only() -> None:
    rotary = RotaryEmbedding(RopeConfig(), 32, "cpu", torch.float32)
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def score(query: int, key: int) -> float:
        rotated = [x.clone() for x in (q, k)]
        for x, position in zip(rotated, (query, key), strict=True):
            rotate(x, rotary(torch.tensor([position])))
        return float((rotated[0] * rotated[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_rotating_a_slice_leaves_its_neighbours_alone() -> None:
    qkv = torch.randn(2, 6, 16)
    before = qkv.clone()
    rotate(qkv[:, :4], RotaryEmbedding(RopeConfig(), 16, "cpu", torch.float32)(torch.tensor([3, 9])))
    assert torch.equal(qkv[:, 4:], before[:, 4:])
    assert not torch.equal(qkv[:, :4], before[:, :4])
