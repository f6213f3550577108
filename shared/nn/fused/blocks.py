"""The two blocks of a decoder layer from fused kernels. A `Stream` goes in and comes out; its norms are computed on the way."""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.kernels.add_norm import add_sums
from outrider.kernels.rope_store import rope_store
from outrider.kernels.silu_mul import silu_mul
from outrider.kernels.skinny_gemm import Rotary, project, project_add, project_gated, project_rotated
from outrider.kernels.stream import FEW_ROWS, Stream
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.config import Activation
from outrider.shared.nn.layers import Attention, GatedMLP, RMSNorm
from outrider.shared.nn.linear import Linear
from outrider.shared.nn.rope import Rotation


class Reduce(Protocol):
    """The addition of a product to the residual where ranks of tensor parallelism hold its parts."""

    def add(
        self,
        parts: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Stream:
        """Do what `add_sums` does with the sum over the ranks of the parts."""
        ...


def attention_block(
    block: Attention,
    stream: Stream,
    rotation: Rotation,
    attention: StoredAttention,
    pool: KVPool,
    following: RMSNorm,
    *,
    reduce: Reduce | None = None,
) -> Stream:
    """Return the residual stream after the attention of a layer, prepared for the norm `following`."""
    few = stream.scaled.shape[0] <= FEW_ROWS
    qkv, norm = block.qkv, block.head_norm
    k_plane, v_plane = pool.k_planes[block.layer], pool.v_planes[block.layer]
    if few and norm is None:
        rotary = Rotary(rotation.cos, rotation.sin, k_plane, v_plane, attention.slots)
        q = project_rotated(stream, qkv.weight, rotary, scales=qkv.scales, bias=qkv.bias)
    else:
        parts = project(stream.scaled, qkv.weight, scales=qkv.scales) if few else qkv.product(stream.scaled)
        q = rope_store(
            parts, rotation.cos, rotation.sin, k_plane, v_plane, attention.slots, stream=stream, bias=qkv.bias,
            head_norm=norm.weight if norm else None, head_eps=norm.eps if norm else 0.0,
        )  # fmt: skip
    attended = attention.attend(block.layer, q, pool, block.scale, block.window, block.sinks)
    return _add(attended, block.o, stream.residual, following, reduce, None)


def mlp_block(
    block: GatedMLP,
    stream: Stream,
    following: RMSNorm,
    *,
    reduce: Reduce | None = None,
    out: torch.Tensor | None = None,
) -> Stream:
    """Return the residual stream after the MLP of a layer, prepared for the norm `following`; `out` is where the stream itself goes."""
    few = stream.scaled.shape[0] <= FEW_ROWS
    gelu = block.activation is Activation.GELU_TANH
    if few:
        inner = project_gated(stream, block.gate_up.weight, scales=block.gate_up.scales, bias=block.gate_up.bias, gelu=gelu)
    else:
        inner = silu_mul(block.gate_up.product(stream.scaled), bias=block.gate_up.bias, gelu=gelu)
    return _add(inner, block.down, stream.residual, following, reduce, out)


def _add(
    x: torch.Tensor,
    linear: Linear,
    residual: torch.Tensor,
    norm: RMSNorm,
    reduce: Reduce | None,
    out: torch.Tensor | None,
) -> Stream:
    few = x.shape[0] <= FEW_ROWS
    if few and reduce is None:
        return project_add(x, linear.weight, residual, norm.weight, norm.eps, scales=linear.scales, bias=linear.bias, out=out)
    parts = project(x, linear.weight, scales=linear.scales) if few else linear.product(x)
    add = add_sums if reduce is None else reduce.add
    return add(parts, residual, norm.weight, norm.eps, bias=linear.bias, out=out)
