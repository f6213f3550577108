"""A head's decoder layers and its logits from fused kernels, as the target's decoder runs them on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.kernels.skinny_gemm import project
from outrider.kernels.stream import MANY_ROWS, Stream
from outrider.services.draft.heads.base import last_rows
from outrider.shared.attn.base import AttentionBatch
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.fused import attention_block, mlp_block
from outrider.shared.nn.layers import Attention, AttentionBlock, DecoderLayer, GatedMLP, MLPBlock, RMSNorm
from outrider.shared.nn.linear import Linear
from outrider.shared.nn.rope import Rotation


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

    def forward(
        self,
        entering: torch.Tensor,
        residual: torch.Tensor,
        rotation: Rotation,
        attention: StoredAttention,
        pool: KVPool,
        ends: AttentionBatch | None = None,
    ) -> Stream:
        """Return the residual stream behind the last layer, prepared for its norm.

        Args:
            entering: ``[rows, input]``, what the first q-k-v product reads, normed.
            residual: ``[rows, hidden]``, what goes round the first layer.
            rotation, attention, pool, ends: As in `RecurrentHead.forward`; with `ends`, of the last layer's other rows K and V alone are
                computed.
        """
        stream = Stream(residual, entering, None, 0.0)
        for block in self._blocks:
            if ends is not None and block is self._blocks[-1]:
                stream = replace(stream, residual=last_rows(stream.residual, ends.page_table.shape[0]))
                attention = _Ends(attention, ends)
            stream = attention_block(block.attention, stream, rotation, attention, pool, block.between)
            stream = mlp_block(block.mlp, stream, block.after)
        return stream

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` for normed ``states [rows, hidden]``."""
        if states.shape[0] > MANY_ROWS or self._lm_head.bias is not None:
            return self._lm_head(states)
        parts = project(states, self._lm_head.weight)
        return parts.sum(0) if parts.dim() == 3 else parts


class _Ends(StoredAttention):
    """Stores K and V of all rows that were planned, and attends from the last of each sequence.

    Args:
        attention: Planned for all rows; attending plans it for the last ones.
        ends: What those see.
    """

    def __init__(self, attention: StoredAttention, ends: AttentionBatch) -> None:
        self._attention = attention
        self._ends = ends
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
        self._attention.plan(self._ends)
        return self._attention.attend(layer, last_rows(q, self._ends.page_table.shape[0]), pool, scale, window, sinks, softcap)


def fuse(
    first: tuple[AttentionBlock, MLPBlock], between: RMSNorm, others: Sequence[DecoderLayer], last: RMSNorm, lm_head: Linear
) -> FusedHead | None:
    """Return what runs a head's layers, or None if they are of a kind that has no fused kernels.

    Args:
        first: Attention and MLP of layer 0, whose input is the head's own affair.
        between: The norm between the two.
        others: The layers behind it.
        last: The norm behind all; of a head without one, any: what it makes is not read.
        lm_head: Makes logits of states.
    """
    layers = [(*first, between), *((layer.attention, layer.mlp, layer.post_attention_norm) for layer in others)]
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
