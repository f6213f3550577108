"""Shapes and loading of multi-head latent attention in draft heads, for example in heads for Kimi-K2.

The computation itself is in `shared.nn.layers.latent_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.services.draft.heads.files.head_config import HeadConfig
from outrider.shared.nn.checkpoint.checkpoint_reader import TensorShape
from outrider.shared.nn.families.traits import LatentConfig
from outrider.shared.nn.layers.latent_attention import LATENT_NORM_EPS, LatentAttention
from outrider.shared.nn.layers.modules import Linear, RMSNorm


def latent_shapes(
    config: HeadConfig, latent: LatentConfig, prefix: str, input_size: int
) -> dict[str, TensorShape]:
    """Return the name and shape of each tensor of one layer's multi-head latent attention.

    Args:
        config: The head's configuration.
        latent: Sizes of the latent attention of the head.
        prefix: Prefix of the tensors' names.
        input_size: Width of the input of the query projection and of the latent projection.
    """
    head_rows = config.num_heads * (latent.nope_dim + latent.rope_dim)
    shapes: dict[str, TensorShape] = {
        f"{prefix}kv_a_proj_with_mqa.weight": (latent.rank + latent.rope_dim, input_size),
        f"{prefix}kv_a_layernorm.weight": (latent.rank,),
        f"{prefix}kv_b_proj.weight": (config.num_heads * (latent.nope_dim + latent.value_dim), latent.rank),
        f"{prefix}o_proj.weight": (config.hidden_size, config.num_heads * latent.value_dim),
    }
    if latent.query_rank is None:
        return shapes | {f"{prefix}q_proj.weight": (head_rows, input_size)}
    return shapes | {
        f"{prefix}q_a_proj.weight": (latent.query_rank, input_size),
        f"{prefix}q_a_layernorm.weight": (latent.query_rank,),
        f"{prefix}q_b_proj.weight": (head_rows, latent.query_rank),
    }


def take_latent_attention(
    take: Callable[[str], torch.Tensor],
    take_norm: Callable[[str, float], RMSNorm],
    config: HeadConfig,
    latent: LatentConfig,
    layer: int,
) -> LatentAttention:
    """Read the tensors of one layer's multi-head latent attention from a head's checkpoint.

    Args:
        take: Function that returns a tensor of the head, given the tensor's canonical name.
        take_norm: Function that returns a norm, given the norm's canonical name and epsilon.
        config: The head's configuration.
        latent: Sizes of the latent attention of the head.
        layer: Index of the layer.
    """
    prefix = f"layers.{layer}.self_attn."
    heads = config.num_heads

    def queries(name: str) -> Linear:
        weight = take(f"{prefix}{name}.weight")
        return Linear(_halves(weight.view(heads, -1, weight.shape[1]), latent).reshape(weight.shape))

    if latent.query_rank is None:
        projections, query_norm = [queries("q_proj")], None
    else:
        projections = [Linear(take(f"{prefix}q_a_proj.weight")), queries("q_b_proj")]
        query_norm = take_norm(f"{prefix}q_a_layernorm.weight", LATENT_NORM_EPS)
    both = take(f"{prefix}kv_b_proj.weight").view(heads, -1, latent.rank)  # [heads, nope + value, rank]
    return LatentAttention(
        projections,
        query_norm,
        Linear(_halves(take(f"{prefix}kv_a_proj_with_mqa.weight")[None], latent)[0]),
        take_norm(f"{prefix}kv_a_layernorm.weight", LATENT_NORM_EPS),
        both[:, : latent.nope_dim].contiguous(),
        both[:, latent.nope_dim :].transpose(1, 2).contiguous(),
        Linear(take(f"{prefix}o_proj.weight")),
        latent,
        (latent.nope_dim + latent.rope_dim) ** -0.5 * config.rope.softmax_factor,
        layer,
    )


def _halves(rows: torch.Tensor, latent: LatentConfig) -> torch.Tensor:
    """Reorder the rotated (last) rows of each head in ``[heads, rows, columns]`` from pairs to halves.

    `rope.rotate` rotates halves; checkpoints with ``rope_interleave`` store pairs.
    """
    if not latent.interleaved:
        return rows
    rotated = rows[:, -latent.rope_dim :]
    return torch.cat([rows[:, : -latent.rope_dim], rotated[:, 0::2], rotated[:, 1::2]], dim=1).contiguous()
