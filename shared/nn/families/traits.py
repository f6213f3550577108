"""What a family of decoders has beyond plain Llama, as data: a family's file fills it in, the loader and the layers read it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: K and V of all heads are projections of one cached latent row.

    Attributes:
        rank: Width of the latent.
        query_rank: Width of the queries' own latent; None: they are projected directly.
        nope_dim, rope_dim, value_dim: Per head: unrotated and rotated part of queries and keys, and the values.
        interleaved: The file's rotated dimensions lie in pairs (x0, x1), not in halves.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family reads from its own keys of a config.json.

    Attributes:
        qkv_bias, o_bias, mlp_bias: Which projections carry a bias.
        head_norm: RMSNorm over each head of Q and K before rotation.
        windows: Per layer, how many tokens a row sees (itself included); 0: all. Empty: 0 everywhere.
        sinks: A learned logit per head takes part in each softmax and carries no value.
        experts: Sparse layers, or None.
        sparse: Per layer, whether its MLP is the experts. Empty: none.
        latent: Multi-head latent attention, or None.
        rope_theta: What a config without one means.
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
