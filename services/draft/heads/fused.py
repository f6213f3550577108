"""A head's decoder layers and its logits from fused kernels, as the target's decoder runs them on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from outrider.kernels.add_norm import normalise
from outrider.kernels.rope_store import Lookup, rope_store
from outrider.kernels.skinny_gemm import project, project_normed
from outrider.kernels.stream import MANY_ROWS, Stream
from outrider.services.draft.growth.recurrent_head import Ends
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.fused import attention_block, mlp_block
from outrider.shared.nn.fused.products import ProductUse, uses_of
from outrider.shared.nn.layers.blocks import (
    Attention,
    AttentionBlock,
    DecoderLayer,
    GatedMLP,
    MLPBlock,
    RMSNorm,
)
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.rope import Rotation


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """One layer: its blocks, and the norms before its MLP and after it."""

    attention: Attention
    mlp: GatedMLP
    between: RMSNorm
    after: RMSNorm


class FusedHead:
    """Runs a head's layers over the rows of a planned step.

    Args:
        blocks: The layers.
        lm_head: ``[vocabulary, hidden]``.
    """

    def __init__(self, blocks: Sequence[FusedBlock], lm_head: Linear) -> None:
        self._blocks = blocks
        self._lm_head = lm_head
        self._behind: Stream | None = None

    def forward(
        self,
        stream: Stream,
        rotation: Rotation,
        attention: StoredAttention,
        pool: KVPool,
        ends: Ends | None = None,
        lookup: Lookup | None = None,
    ) -> Stream:
        """Return the residual stream behind the last layer, prepared for its norm.

        Args:
            stream: What the first q-k-v product reads, and what goes round the first layer.
            rotation, attention, pool, ends: As in `RecurrentHead.forward`.
            lookup: What a table adds to the first q-k-v product.
        """
        for block in self._blocks:
            if ends is not None and block is self._blocks[-1]:
                if ends.batch is None:
                    return _store(block.attention, stream, rotation, attention.slots, pool, lookup)
                stream = replace(stream, residual=ends.of(stream.residual))
                attention = _EndAttention(attention, ends, ends.batch)
            stream = attention_block(
                block.attention, stream, rotation, attention, pool, block.between, lookup=lookup
            )
            lookup = None
            stream = mlp_block(block.mlp, stream, block.after)
        self._behind = stream
        return stream

    def behind(self, states: torch.Tensor) -> Stream | None:
        """Return the stream behind the last pass if these very states are its residual and their sums of squares are known.

        Whoever reads them next then needs no kernel of its own for the norm.
        """
        stream = self._behind
        return (
            stream if stream is not None and stream.residual is states and stream.sums is not None else None
        )

    def logits_behind(self, stream: Stream) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` for the rows of a stream, normed."""
        if self._lm_head.bias is not None:
            return self._lm_head(normalise(stream))
        parts = project_normed(stream, self._lm_head.weight)
        return parts.sum(0) if parts.dim() == 3 else parts

    def uses(self) -> list[ProductUse]:
        """Return the uses of all products, for a trial of tiles."""
        layers = [(block.attention, block.mlp) for block in self._blocks]
        return uses_of(layers, self._lm_head, self._lm_head.weight.dtype, reduced=False)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` for normed ``states [rows, hidden]``."""
        if states.shape[0] > MANY_ROWS or self._lm_head.bias is not None:
            return self._lm_head(states)
        parts = project(states, self._lm_head.weight)
        return parts.sum(0) if parts.dim() == 3 else parts


def _store(
    block: Attention, stream: Stream, rotation: Rotation, slots: torch.Tensor, pool: KVPool, lookup: Lookup | None
) -> Stream:  # fmt: skip
    """Write K and V of all rows; return a stream of no rows."""
    weight, first = block.qkv.weight, block.num_heads * block.head_dim
    k_plane, v_plane = pool.k_planes[block.layer], pool.v_planes[block.layer]
    rope_store(
        functional.linear(stream.scaled, weight[first:]), rotation.cos, rotation.sin, k_plane, v_plane, slots, stream=stream,
        bias=None if block.qkv.bias is None else block.qkv.bias[first:],
        head_norm=block.head_norm.weight[block.num_heads :] if block.head_norm else None,
        head_eps=block.head_norm.eps if block.head_norm else 0.0,
        lookup=None if lookup is None else Lookup(lookup.table[:, first:], lookup.index),
    )  # fmt: skip
    return Stream(stream.residual[:0], stream.residual[:0], None, 0.0)


class _EndAttention(StoredAttention):
    """Stores K and V of all rows that were planned, and attends from the last of each sequence.

    Args:
        attention: Planned for all rows; attending plans it for the last ones.
        ends: Which they are.
        batch: What they see.
    """

    def __init__(self, attention: StoredAttention, ends: Ends, batch: AttentionBatch) -> None:
        self._attention = attention
        self._ends = ends
        self._batch = batch
        self._slots = attention.slots

    @property
    def slots(self) -> torch.Tensor:
        """See `StoredAttention.slots`."""
        return self._slots

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend.plan`."""
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
        """See `StoredAttention.attend`."""
        self._attention.plan(self._batch)
        return self._attention.attend(layer, self._ends.of(q), pool, scale, window, sinks, softcap)


def fuse(
    first: tuple[AttentionBlock, MLPBlock],
    between: RMSNorm,
    others: Sequence[DecoderLayer],
    last: RMSNorm,
    lm_head: Linear,
) -> FusedHead | None:
    """Return what runs a head's layers, or None if they are of a kind that has no fused kernels.

    Args:
        first: Attention and MLP of layer 0, whose input is the head's own affair.
        between: The norm between the two.
        others: The layers behind it.
        last: The norm behind all; of a head without one, any: what it makes is not read.
        lm_head: Makes logits of states.
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
    """Whether layers of this type run from fused kernels on a device."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float32)
