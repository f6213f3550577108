"""Runs a head's decoder layers and lm_head with the fused GPU kernels that the target's decoder uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from outrider.kernels.add_norm import normalise
from outrider.kernels.rope_store import Lookup, rope_store
from outrider.kernels.skinny_gemm import project, project_normed
from outrider.kernels.stream import MANY_ROWS, ResidualStream
from outrider.services.draft.growth.recurrent_head import Ends
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.fused import attention_block, mlp_block
from outrider.shared.nn.fused.products import ProductUse, uses_of
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.modules import (
    Attention,
    AttentionBlock,
    DecoderLayer,
    GatedMLP,
    MLPBlock,
    RMSNorm,
)
from outrider.shared.nn.layers.rope import Rotation


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """One decoder layer: attention, MLP, the norm between them, and the norm after the MLP."""

    attention: Attention
    mlp: GatedMLP
    between: RMSNorm
    after: RMSNorm


class FusedHead:
    """Runs a head's layers over the rows of a planned step.

    Args:
        blocks: The decoder layers, in order.
        lm_head: ``[vocabulary, hidden]``.
    """

    def __init__(self, blocks: Sequence[FusedBlock], lm_head: Linear) -> None:
        self._blocks = blocks
        self._lm_head = lm_head
        self._last: ResidualStream | None = None

    def forward(
        self,
        stream: ResidualStream,
        rotation: Rotation,
        attention: StoredAttention,
        pool: KVPool,
        ends: Ends | None = None,
        lookup: Lookup | None = None,
    ) -> ResidualStream:
        """Run the head's fused layers, and return the residual stream, ready for the final norm.

        Args:
            stream: The input of the first q-k-v product, and the residual that bypasses the first layer.
            rotation, attention, pool, ends: The arguments of `RecurrentHead.forward`.
            lookup: Rows of a precomputed table that are added to the first q-k-v product. With None, nothing
                is added.
        """
        for block in self._blocks:
            if ends is not None and block is self._blocks[-1]:
                # Only the last layer may skip rows. Every other layer must output all rows, from which the
                # next layer computes its K/V.
                if ends.batch is None:
                    return _store(block.attention, stream, rotation, attention.slots, pool, lookup)
                stream = replace(stream, residual=ends.of(stream.residual))
                attention = _EndAttention(attention, ends, ends.batch)
            stream = attention_block(
                block.attention, stream, rotation, attention, pool, block.between, lookup=lookup
            )
            lookup = None  # only the first layer reads the embedding
            stream = mlp_block(block.mlp, stream, block.after)
        self._last = stream
        return stream

    def stream_of(self, states: torch.Tensor) -> ResidualStream | None:
        """Return the residual stream of the last pass if `states` is its residual tensor; otherwise None.

        The result is also None if the sums of squares of the stream's rows were not computed. With these
        sums, the next product can apply the norm without a separate kernel.
        """
        stream = self._last
        return (
            stream if stream is not None and stream.residual is states and stream.sums is not None else None
        )

    def stream_logits(self, stream: ResidualStream) -> torch.Tensor:
        """Normalise the rows of a stream and return their logits, ``[rows, vocabulary]``."""
        if self._lm_head.bias is not None:
            return self._lm_head(normalise(stream))
        parts = project_normed(stream, self._lm_head.weight)
        return parts.sum(0) if parts.dim() == 3 else parts

    def uses(self) -> list[ProductUse]:
        """Return all matrix products of the head, for the tuning of kernel tiles."""
        layers = [(block.attention, block.mlp) for block in self._blocks]
        return uses_of(layers, self._lm_head, self._lm_head.weight.dtype, reduced=False)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` for normed ``states [rows, hidden]``."""
        if states.shape[0] > MANY_ROWS or self._lm_head.bias is not None:
            return self._lm_head(states)
        parts = project(states, self._lm_head.weight)
        return parts.sum(0) if parts.dim() == 3 else parts


def _store(
    block: Attention,
    stream: ResidualStream,
    rotation: Rotation,
    slots: torch.Tensor,
    pool: KVPool,
    lookup: Lookup | None,
) -> ResidualStream:
    """Store K and V of all rows without computing any states, and return a stream without rows."""
    weight, first = block.qkv.weight, block.num_heads * block.head_dim
    k_plane, v_plane = pool.k_planes[block.layer], pool.v_planes[block.layer]
    rope_store(
        functional.linear(stream.scaled, weight[first:]),
        rotation.cos,
        rotation.sin,
        k_plane,
        v_plane,
        slots,
        stream=stream,
        bias=None if block.qkv.bias is None else block.qkv.bias[first:],
        head_norm=block.head_norm.weight[block.num_heads :] if block.head_norm else None,
        head_eps=block.head_norm.eps if block.head_norm else 0.0,
        lookup=None if lookup is None else Lookup(lookup.table[:, first:], lookup.index),
    )
    return ResidualStream(stream.residual[:0], stream.residual[:0], None, 0.0)


class _EndAttention(StoredAttention):
    """Stores K and V of all planned rows, but computes attention only for the last row of each sequence.

    Args:
        attention: Backend planned for all rows. `attend` plans the backend again, for the last rows only.
        ends: Selects the last rows.
        batch: Attention inputs of the last rows.
    """

    def __init__(self, attention: StoredAttention, ends: Ends, batch: AttentionBatch) -> None:
        self._attention = attention
        self._ends = ends
        self._batch = batch
        self._slots = attention.slots

    @property
    def slots(self) -> torch.Tensor:
        return self._slots

    def plan(self, batch: AttentionBatch) -> None:
        self._attention.plan(batch)
        self._slots = self._attention.slots

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        pool: KVPool,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        self._attention.plan(self._batch)
        return self._attention.attend(layer, self._ends.of(q), pool, scale, window, sinks, softcap)


def fuse(
    first: tuple[AttentionBlock, MLPBlock],
    between: RMSNorm,
    others: Sequence[DecoderLayer],
    last: RMSNorm,
    lm_head: Linear,
) -> FusedHead | None:
    """Build the fused path of a draft head, or return None if a layer has no fused kernels.

    Args:
        first: Attention and MLP of layer 0. The head prepares the input of layer 0 outside the fused path.
        between: The norm between the attention and the MLP of layer 0.
        others: The layers after layer 0.
        last: The norm after the last layer. For a head without such a norm, pass any norm. Its output is
            then not used.
        lm_head: Projects states to logits.
    """
    layers = [
        (*first, between),
        *((layer.attention, layer.mlp, layer.post_attention_norm) for layer in others),
    ]
    after = [*(layer.input_norm for layer in others), last]
    blocks = [
        FusedBlock(attention, mlp, norm, then)
        for (attention, mlp, norm), then in zip(layers, after, strict=True)
        if type(attention) is Attention and type(mlp) is GatedMLP
    ]
    return FusedHead(blocks, lm_head) if len(blocks) == len(layers) else None


def runs_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether fused kernels exist for this device and type."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float32)
