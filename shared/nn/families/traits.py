"""Defines `Traits`: how a family differs from plain Llama, as data for the loader and the layers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: K and V of all heads are projections of one cached latent row.

    Attributes:
        rank: Width of the latent.
        query_rank: Width of the queries' own latent. None if queries are projected directly.
        nope_dim, rope_dim, value_dim: Widths per head of the unrotated part of queries and keys, of the
            rotated part of queries and keys, and of the values, respectively.
        interleaved: True if the file stores the rotated dimensions as adjacent pairs (x0, x1) instead of two
            halves.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """Features of a family, read from the family's own keys in a config.json.

    Attributes:
        qkv_bias, o_bias, mlp_bias: True if the projections have a bias.
        head_norm: True if RMSNorm is applied to each head of Q and K before rotation.
        windows: For each layer, the number of tokens that a row sees, including itself. 0 means all tokens.
            An empty tuple means 0 in every layer.
        sinks: True if each softmax includes a learned logit per head that carries no value.
        experts: The sparse layers, or None.
        sparse: For each layer, True if its MLP consists of experts. An empty tuple means that no layer has
            experts.
        latent: Multi-head latent attention, or None.
        rope_theta: The theta of a config that has no rope_theta.
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
