"""Norms, grouped-query attention, gated MLP and the decoder layer, as callable objects with weights.

Weights are shared by reference and never change. The layers are plain objects and not `torch.nn.Module`s. In
a decode step at batch size 1, the hooks, parameters and training modes of modules would take more time than
the small matrix products.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch.nn import functional

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.config.model_config import Activation
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.rope import Rotation, rotate

__all__ = [
    "Attention",
    "AttentionBlock",
    "DecoderLayer",
    "GatedMLP",
    "HeadNorm",
    "Linear",
    "MLPBlock",
    "RMSNorm",
]


class RMSNorm:
    """RMSNorm, ``x / sqrt(mean(x²) + eps) * weight`` over the last dimension.

    In fp32 on a CPU, the norm is computed as ``x / hypot(‖x‖, sqrt(size · eps)) * (weight · sqrt(size))``.
    This form takes half the time of torch's own norm, which consists of nine small operations on a CPU.

    Args:
        weight: ``[size]``.
        eps: Small number that is added to the mean square.
    """

    __slots__ = ("_floor", "_scaled_weight", "_shape", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = tuple(weight.shape)
        self._scaled_weight: torch.Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype is torch.float32:
            self._scaled_weight = weight * math.sqrt(weight.numel())
            self._floor = torch.tensor(math.sqrt(weight.numel() * eps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed rows as a new tensor of the same shape."""
        if self._scaled_weight is None:
            return functional.rms_norm(x, self._shape, self.weight, self.eps)
        return x.div(torch.linalg.vector_norm(x, 2, -1, True).hypot_(self._floor)).mul_(self._scaled_weight)


class HeadNorm:
    """`RMSNorm` over each head of Q and K, with one weight for Q and one for K (Qwen3).

    Args:
        q_weight, k_weight: ``[head_dim]``, for the heads of Q and of K.
        num_heads, num_kv_heads: Number of heads of Q, and of K.
        eps: Small number that is added to the mean square of each head.
    """

    __slots__ = ("_shape", "eps", "weight")

    def __init__(
        self, q_weight: torch.Tensor, k_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        self.weight = torch.cat(
            [q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)]
        )  # [heads + kv_heads, head_dim]
        self._shape = tuple(q_weight.shape)
        self.eps = eps

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the normed heads ``[rows, heads + kv_heads, head_dim]`` as a new tensor."""
        return functional.rms_norm(heads, self._shape, None, self.eps).mul_(self.weight)


class AttentionBlock(Protocol):
    """Attention of one layer, added to the residual stream."""

    @property
    def nbytes(self) -> int:
        """Size of the projections, in bytes."""
        ...

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Return ``residual + o(attention(x))``, ``[rows, hidden]``, and write the rows' K/V into the pool.

        Args:
            x: ``[rows, input]``, already normed.
            residual: ``[rows, hidden]``.
            rotation: Rotation for the rows' positions.
            attention: Backend that was planned for these rows.
            pool: Pool that stores the K/V.
        """
        ...


class MLPBlock(Protocol):
    """MLP of one layer, dense or sparse, added to the residual stream."""

    @property
    def nbytes(self) -> int:
        """Size of the matrices, in bytes."""
        ...

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``residual + mlp(x)``, ``[rows, hidden]``."""
        ...


class GatedMLP:
    """Gated MLP, ``down(act(gate(x)) * up(x))``. One matrix contains the rows of both gate and up.

    Args:
        gate_up: ``[2 * intermediate, hidden]``. The gate rows come before the up rows.
        down: ``[hidden, intermediate]``.
        activation: Function that is applied to the gate.
    """

    __slots__ = ("activation", "down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation = Activation.SILU) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    @property
    def nbytes(self) -> int:
        """Size of the matrices, in bytes."""
        return self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``residual + mlp(x)``, ``[rows, hidden]``."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate = (
            functional.silu(gate)
            if self.activation is Activation.SILU
            else functional.gelu(gate, approximate="tanh")
        )
        return self.down.plus(residual, gate.mul_(up))


class Attention:
    """Rotary grouped-query attention with a fused q-k-v projection.

    The input may be wider than the hidden size. In EAGLE-3, it is twice as wide.

    Args:
        qkv: ``[(heads + 2 * kv_heads) * head_dim, input]``. The rows are in the order q, k, v.
        o: ``[hidden, heads * head_dim]``.
        num_heads, num_kv_heads, head_dim: Number of query heads, number of K/V heads, and width of a head.
        layer: Index of the layer in the KV pool that stores K and V.
        head_norm: Norm of the heads of Q and K before rotation, or None.
        window: Number of tokens that a row sees, including itself. 0 means all tokens.
        sinks: ``[heads]``, or None. Each head has one logit that takes part in its softmax but has no value
            vector.
    """

    __slots__ = (
        "_rotated", "_widths", "head_dim", "head_norm", "layer", "num_heads", "num_kv_heads", "o", "qkv",
        "scale", "sinks", "window",
    )  # fmt: skip

    def __init__(
        self,
        qkv: Linear,
        o: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer: int,
        *,
        head_norm: HeadNorm | None = None,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.qkv = qkv
        self.o = o
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.layer = layer
        self.head_norm = head_norm
        self.window = window
        self.sinks = sinks
        self.scale = head_dim**-0.5
        self._rotated = num_heads + num_kv_heads
        self._widths = (num_heads, num_kv_heads, num_kv_heads)

    @property
    def nbytes(self) -> int:
        """Size of the projections, in bytes."""
        return self.qkv.nbytes + self.o.nbytes

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Return ``residual + o(attention(x))``, ``[rows, hidden]``; see `AttentionBlock.__call__`."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [rows, heads + 2 * kv_heads, head_dim]
        if self.head_norm is None:
            rotate(qkv[:, : self._rotated], rotation)
            q, k, v = qkv.split_with_sizes(self._widths, 1)
        else:
            heads = self.head_norm(qkv[:, : self._rotated])
            rotate(heads, rotation)
            q, k, v = heads[:, : self.num_heads], heads[:, self.num_heads :], qkv[:, self._rotated :]
        return self.o.plus(
            residual, attention.run(self.layer, q, k, v, pool, self.scale, self.window, self.sinks)
        )


class DecoderLayer:
    """Pre-norm decoder layer, which adds first attention and then the MLP to the residual stream."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(
        self, input_norm: RMSNorm, attention: AttentionBlock, post_attention_norm: RMSNorm, mlp: MLPBlock
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.post_attention_norm = post_attention_norm
        self.mlp = mlp

    def __call__(
        self, hidden: torch.Tensor, rotation: Rotation, attention: AttentionBackend, pool: KVPool
    ) -> torch.Tensor:
        """Return the residual stream after this layer, ``[rows, hidden]``, as a new tensor."""
        hidden = self.attention(self.input_norm(hidden), hidden, rotation, attention, pool)
        return self.mlp(self.post_attention_norm(hidden), hidden)
