"""Defines `Traits`: how a family differs from plain Llama, as data for the loader and the layers."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: K and V of all heads are projections of one cached latent row.

    Attributes:
        rank: Width of the latent.
        query_rank: Width of the queries' own latent; None if queries are projected directly.
        nope_dim, rope_dim, value_dim: Widths per head: the unrotated and the rotated part of queries and
            keys, and the values.
        interleaved: True if the file stores rotated dimensions in pairs (x0, x1) instead of halves.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """Features of a family, from its own keys of a config.json.

    Attributes:
        qkv_bias, o_bias, mlp_bias: True if the projections have a bias.
        head_norm: True if RMSNorm is applied to each head of Q and K before rotation.
        windows: Tokens that a row sees, itself included, per layer; 0 for all. Empty: 0 in every layer.
        sinks: True if each softmax includes a learned logit per head that carries no value.
        experts: The sparse layers, or None.
        sparse: True, per layer, if its MLP consists of experts. Empty: no layer.
        latent: Multi-head latent attention, or None.
        rope_theta: Default for a config without rope_theta.
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
