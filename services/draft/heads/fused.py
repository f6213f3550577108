"""A head's decoder layers and its logits from fused kernels, as the target's decoder runs them on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.kernels.ahead import Prefetch
from outrider.kernels.skinny_gemm import project
from outrider.kernels.stream import FEW_ROWS, Stream
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.fused import Ahead, attention_block, mlp_block
from outrider.shared.nn.fused.plan import LayerAhead, plan_ahead
from outrider.shared.nn.layers import Attention, AttentionBlock, DecoderLayer, GatedMLP, MLPBlock, RMSNorm
from outrider.shared.nn.linear import Linear
from outrider.shared.nn.rope import Rotation

BEHIND_LOGITS_BYTES = 24 << 20
"""What the product with lm_head brings into L2 of the next level's first matrix: half a dozen small kernels lie between the two."""


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
        matrices = [(b.attention.qkv.weight, b.attention.o.weight, b.mlp.gate_up.weight, b.mlp.down.weight) for b in blocks]
        self._ahead: Sequence[LayerAhead] = plan_ahead(matrices, lm_head.weight, Ahead())
        self._lm_head = lm_head
        self._first = Prefetch.of(matrices[0][0], BEHIND_LOGITS_BYTES)

    def forward(
        self, entering: torch.Tensor, residual: torch.Tensor, rotation: Rotation, attention: StoredAttention, pool: KVPool
    ) -> Stream:
        """Return the residual stream behind the last layer, prepared for its norm.

        Args:
            entering: ``[rows, input]``, what the first q-k-v product reads, normed.
            residual: ``[rows, hidden]``, what goes round the first layer.
            rotation, attention, pool: As in `RecurrentHead.forward`.
        """
        stream = Stream(residual, entering, None, 0.0)
        for block, ahead in zip(self._blocks, self._ahead, strict=True):
            stream = attention_block(block.attention, stream, rotation, attention, pool, block.between, ahead=ahead)
            stream = mlp_block(block.mlp, stream, block.after, ahead=ahead)
        return stream

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` for normed ``states [rows, hidden]``."""
        if states.shape[0] > FEW_ROWS or self._lm_head.bias is not None:
            return self._lm_head(states)
        parts = project(states, self._lm_head.weight, following=self._first)
        return parts.sum(0) if parts.dim() == 3 else parts


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
