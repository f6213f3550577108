"""The forward pass of a dense Llama-like decoder with fused kernels, and the conditions for using it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.add_norm import embed_rows, normalise
from outrider.kernels.skinny_gemm import project
from outrider.kernels.stream import FEW_ROWS, MANY_ROWS
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.fused.blocks import ResidualReduce, attention_block, mlp_block
from outrider.shared.nn.fused.products import ProductUse, uses_of
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.modules import Attention, DecoderLayer, GatedMLP, RMSNorm
from outrider.shared.nn.layers.rope import Rotation


def can_fuse(layers: Sequence[DecoderLayer], device: torch.device, dtype: torch.dtype) -> bool:
    """True if these layers can run with fused kernels: on CUDA, with plain attention and plain MLPs."""
    plain = all(type(layer.attention) is Attention and type(layer.mlp) is GatedMLP for layer in layers)
    return plain and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, torch.float32)


class FusedForward:
    """Forward pass of a decoder with fused kernels.

    Matrix products of few rows use this project's kernels. Products of many rows use torch's kernels.

    Args:
        layers: Layers for which `can_fuse` is True.
        embedding: ``[vocabulary, hidden]``.
        norm: The final norm.
        head: The output head, ``[vocabulary, hidden]``.
        reduce: Sums the o and down projections over the ranks. None without tensor parallelism.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        embedding: torch.Tensor,
        norm: RMSNorm,
        head: Linear,
        *,
        reduce: ResidualReduce | None = None,
    ) -> None:
        self._blocks: list[tuple[Attention, GatedMLP]] = []
        self._norms: list[tuple[RMSNorm, RMSNorm]] = []  # per layer: the norms before and after its MLP
        for index, layer in enumerate(layers):
            assert isinstance(layer.attention, Attention)
            assert isinstance(layer.mlp, GatedMLP)
            self._blocks.append((layer.attention, layer.mlp))
            after = layers[index + 1].input_norm if index + 1 < len(layers) else norm
            self._norms.append((layer.post_attention_norm, after))
        self._first_norm = layers[0].input_norm
        self._embedding = embedding
        self._head = head
        self.reduce = reduce

    def forward(
        self,
        tokens: torch.Tensor,
        rotation: Rotation,
        attention: StoredAttention,
        pool: KVPool,
        aux_layer_ids: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run all layers over the rows of a forward pass; see `Decoder.forward`.

        Returns:
            The hidden states after the final norm, ``[rows, hidden]``, and the captured outputs of layers,
            ``[rows, n_aux * hidden]``. The captured outputs are None if no layer is captured.
        """
        stream = embed_rows(tokens, self._embedding, self._first_norm.weight, self._first_norm.eps)
        rows, hidden = stream.scaled.shape
        aux = stream.scaled.new_empty((rows, len(aux_layer_ids) * hidden)) if aux_layer_ids else None
        for index, (attend, mlp) in enumerate(self._blocks):
            between, after = self._norms[index]
            captured = None
            if aux is not None and index in aux_layer_ids:
                captured = aux.narrow(1, list(aux_layer_ids).index(index) * hidden, hidden)
            stream = attention_block(attend, stream, rotation, attention, pool, between, reduce=self.reduce)
            stream = mlp_block(mlp, stream, after, reduce=self.reduce, out=captured)
        return normalise(stream), aux

    def uses(self) -> list[ProductUse]:
        """Return the uses of all products (see `ProductUse`), so that `trial` can time tiles for them."""
        return uses_of(self._blocks, self._head, self._embedding.dtype, reduced=self.reduce is not None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` in the weights' dtype."""
        if hidden.shape[0] > (MANY_ROWS if self._head.scales is None else FEW_ROWS):
            return self._head.product(hidden)
        parts = project(hidden, self._head.weight, scales=self._head.scales)
        return parts.sum(0) if parts.dim() == 3 else parts
