"""Defines `Traits`, which describes how a family differs from plain Llama, for the loader and the layers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Widths of multi-head latent attention: K and V of all heads are projections of one cached latent.

    Attributes:
        rank: Width of the latent.
        query_rank: Width of the latent from which queries are projected. None if queries are projected
            directly from the layer's input.
        nope_dim: Width per head of the part of queries and keys that is not rotated.
        rope_dim: Width per head of the part of queries and keys that is rotated.
        value_dim: Width per head of the values.
        interleaved: True if the checkpoint stores the rotated dimensions as adjacent pairs (x0, x1). False if
            the checkpoint stores these dimensions as two halves.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """Features of a model, read from the keys of a config.json that are specific to the model's family.

    Attributes:
        qkv_bias, o_bias, mlp_bias: True if the projections have a bias.
        head_norm: True if RMSNorm is applied to each head of Q and K before rotation.
        windows: For each layer, the number of tokens that a row sees, including itself. 0 means that a row
            sees all tokens. An empty tuple means 0 for every layer.
        sinks: True if each head has a learned logit that takes part in its softmax but has no value vector.
        experts: The configuration of the sparse layers, or None.
        sparse: For each layer, True if its MLP consists of experts. An empty tuple means that no layer has
            experts.
        latent: The widths of multi-head latent attention, or None for other attention.
        rope_theta: Base of the rotary frequencies, to use if config.json has no rope_theta.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False
    experts: ExpertsConfig | None = None
    sparse: tuple[bool, ...] = ()
    latent: LatentConfig | None = None
    rope_theta: float = 10000.0
