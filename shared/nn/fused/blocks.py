"""The attention block and the MLP block of a decoder layer, built from fused kernels.

Each block takes a `ResidualStream` and returns the next `ResidualStream`. The norms need no separate kernels.
They are computed by the kernels that write and read the residual stream.
"""

from __future__ import annotations

from typing import Protocol

import torch

from outrider.kernels.add_norm import add_sums
from outrider.kernels.rope_store import Lookup, rope_store
from outrider.kernels.silu_mul import silu_mul
from outrider.kernels.skinny_gemm import (
    Epilogue,
    Method,
    Rotary,
    choose_tile,
    project,
    project_add,
    project_gated,
    project_rotated,
)
from outrider.kernels.stream import FEW_ROWS, MANY_ROWS, ResidualStream
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.config.model_config import Activation
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.modules import Attention, GatedMLP, RMSNorm
from outrider.shared.nn.layers.rope import Rotation


class ResidualReduce(Protocol):
    """Adds a product to the residual stream. Each tensor-parallel rank has a part of the product's terms."""

    def add(
        self,
        parts: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> ResidualStream:
        """Return the residual stream ``residual + (sum of parts over the ranks) + bias``.

        The arguments are those of the kernel `add_sums`.
        """
        ...


def attention_block(
    block: Attention,
    stream: ResidualStream,
    rotation: Rotation,
    attention: StoredAttention,
    pool: KVPool,
    following: RMSNorm,
    *,
    reduce: ResidualReduce | None = None,
    lookup: Lookup | None = None,
) -> ResidualStream:
    """Run a layer's attention, and return the residual stream in the form that the norm `following` needs.

    Args:
        block: The layer's attention.
        stream: The residual stream before the attention.
        rotation: The rotary rotation for the rows' positions.
        attention: Attention backend that was planned for these rows.
        pool: KV pool that stores K and V.
        following: The norm that reads the returned residual stream.
        reduce: Sums the output projection over the ranks. None without tensor parallelism.
        lookup: Table entries to add to the rows' q-k-v products, or None. The table has one entry per token.
    """
    qkv, norm = block.qkv, block.head_norm
    k_plane, v_plane = pool.k_planes[block.layer], pool.v_planes[block.layer]
    if norm is None and _own(Epilogue.ROTATED, stream.scaled, qkv):
        rotary = Rotary(rotation.cos, rotation.sin, k_plane, v_plane, attention.slots)
        q = project_rotated(stream, qkv.weight, rotary, scales=qkv.scales, bias=qkv.bias, lookup=lookup)
    else:
        parts = _product(stream.scaled, qkv)
        q = rope_store(
            parts,
            rotation.cos,
            rotation.sin,
            k_plane,
            v_plane,
            attention.slots,
            stream=stream,
            bias=qkv.bias,
            head_norm=norm.weight if norm else None,
            head_eps=norm.eps if norm else 0.0,
            lookup=lookup,
        )
    attended = attention.attend(block.layer, q, pool, block.scale, block.window, block.sinks)
    return _add(attended, block.o, stream.residual, following, reduce, None)


def mlp_block(
    block: GatedMLP,
    stream: ResidualStream,
    following: RMSNorm,
    *,
    reduce: ResidualReduce | None = None,
    out: torch.Tensor | None = None,
) -> ResidualStream:
    """Run a layer's MLP, and return the residual stream in the form that the norm `following` needs.

    Args:
        block: The layer's MLP.
        stream: The residual stream before the MLP.
        following: The norm that reads the returned residual stream.
        reduce: Sums the down projection over the ranks. None without tensor parallelism.
        out: Tensor to write the residual stream to. With None, a new tensor is created.
    """
    gelu = block.activation is Activation.GELU_TANH
    if _own(Epilogue.GATED, stream.scaled, block.gate_up):
        inner = project_gated(
            stream, block.gate_up.weight, scales=block.gate_up.scales, bias=block.gate_up.bias, gelu=gelu
        )
    else:
        inner = silu_mul(block.gate_up.product(stream.scaled), stream, bias=block.gate_up.bias, gelu=gelu)
    return _add(inner, block.down, stream.residual, following, reduce, out)


def _own(epilogue: Epilogue, x: torch.Tensor, linear: Linear) -> bool:
    """True if the kernel `skinny_gemm` should compute this product.

    It computes all products of up to `FEW_ROWS` rows. It also computes a product of up to `MANY_ROWS` rows,
    unless the weight is in FP8 or `choose_tile` prefers the library's product.
    """
    if x.shape[0] <= FEW_ROWS:
        return True
    if x.shape[0] > MANY_ROWS or linear.scales is not None:
        return False
    tile = choose_tile(epilogue, x, linear.weight)
    return tile.method is not Method.LIBRARY or tile.splits > 1


def _product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """Return ``x @ weight.T``, or partial sums of this product that the next kernel adds up."""
    if _own(Epilogue.PLAIN, x, linear):
        return project(x, linear.weight, scales=linear.scales)
    return linear.product(x)


def _add(
    x: torch.Tensor,
    linear: Linear,
    residual: torch.Tensor,
    norm: RMSNorm,
    reduce: ResidualReduce | None,
    out: torch.Tensor | None,
) -> ResidualStream:
    if reduce is None and _own(Epilogue.ADD, x, linear):
        return project_add(
            x, linear.weight, residual, norm.weight, norm.eps, scales=linear.scales, bias=linear.bias, out=out
        )
    parts = _product(x, linear)
    add = add_sums if reduce is None else reduce.add
    return add(parts, residual, norm.weight, norm.eps, bias=linear.bias, out=out)
