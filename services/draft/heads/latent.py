"""Heads with multi-head latent attention (Kimi-K2): the tensors of their attention. The computation is `shared.nn.latent`'s."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.services.draft.heads.head_config import HeadConfig
from outrider.shared.nn.latent import LATENT_NORM_EPS, LatentAttention
from outrider.shared.nn.layers import Linear
from outrider.shared.nn.loader import CheckpointReader, Shape
from outrider.shared.nn.traits import LatentConfig

if TYPE_CHECKING:
    from outrider.services.draft.heads.keys import HeadKeys


def latent_shapes(config: HeadConfig, latent: LatentConfig, prefix: str, input_size: int) -> dict[str, Shape]:
    """Return name → shape of a layer's attention behind `prefix`; `input_size` is the width that queries and latents are made from."""
    head_rows = config.num_heads * (latent.nope_dim + latent.rope_dim)
    shapes: dict[str, Shape] = {
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
    keys: HeadKeys, reader: CheckpointReader, config: HeadConfig, latent: LatentConfig, layer: int
) -> LatentAttention:
    """Read the attention of a layer."""
    prefix = f"layers.{layer}.self_attn."
    heads = config.num_heads

    def queries(name: str) -> Linear:
        weight = keys.take(reader, f"{prefix}{name}.weight")
        return Linear(_halves(weight.view(heads, -1, weight.shape[1]), latent).reshape(weight.shape))

    if latent.query_rank is None:
        projections, query_norm = [queries("q_proj")], None
    else:
        projections = [Linear(keys.take(reader, f"{prefix}q_a_proj.weight")), queries("q_b_proj")]
        query_norm = keys.take_norm(reader, f"{prefix}q_a_layernorm.weight", LATENT_NORM_EPS)
    both = keys.take(reader, f"{prefix}kv_b_proj.weight").view(
        heads, -1, latent.rank
    )  # [heads, nope + value, rank]
    return LatentAttention(
        projections,
        query_norm,
        Linear(_halves(keys.take(reader, f"{prefix}kv_a_proj_with_mqa.weight")[None], latent)[0]),
        keys.take_norm(reader, f"{prefix}kv_a_layernorm.weight", LATENT_NORM_EPS),
        both[:, : latent.nope_dim].contiguous(),
        both[:, latent.nope_dim :].transpose(1, 2).contiguous(),
        Linear(keys.take(reader, f"{prefix}o_proj.weight")),
        latent,
        (latent.nope_dim + latent.rope_dim) ** -0.5 * config.rope.softmax_factor,
        layer,
    )


def _halves(rows: torch.Tensor, latent: LatentConfig) -> torch.Tensor:
    """Bring the rotated rows, the last of ``[heads, rows, columns]``, from pairs into halves, as `rope.rotate` turns them."""
    if not latent.interleaved:
        return rows
    rotated = rows[:, -latent.rope_dim :]
    return torch.cat([rows[:, : -latent.rope_dim], rotated[:, 0::2], rotated[:, 1::2]], dim=1).contiguous()
