"""The decoder of all target families over paged K/V."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.nn import functional

from outrider.kernels.verify import SamplingTensors, choose_tokens
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.kv.pool import KVPool, token_bytes
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.fused import FusedForward, can_fuse
from outrider.shared.nn.layers.blocks import DecoderLayer, Linear, RMSNorm
from outrider.shared.nn.layers.fp8_linear import Fp8Linear, quantize_layer
from outrider.shared.nn.layers.load import load_attention, load_layer, load_mlp
from outrider.shared.nn.layers.rope import RotaryEmbedding
from outrider.shared.obs.logging import get_logger

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

__all__ = [
    "Decoder",
    "DecoderOutput",
    "default_dtype",
    "load_attention",
    "load_layer",
    "load_mlp",
]

_log = get_logger("outrider.decoder")

Pool = TypeVar("Pool", bound=KVPool)
Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all)."""
OnLayer = Callable[[DecoderLayer], None]
"""Changes a layer as soon as it is loaded, before the next one is: what it lets go is free again."""


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """What a forward pass returns.

    Attributes:
        hidden: ``[rows, hidden_size]`` after the final norm; input of `Decoder.logits`.
        aux: ``[rows, n_aux * hidden_size]``, residual stream after each of the named layers, or None when none was named.
    """

    hidden: torch.Tensor
    aux: torch.Tensor | None


class Decoder:
    """Embedding, decoder layers, final norm and output head. Stateless: K/V lives in the pool that each call is given.

    Attributes:
        config, device, dtype: What was loaded, where, and the type of weights and activations.
        embedding: ``[vocab, hidden]``.
        lm_head: ``[vocab, hidden]``; the same tensor as `embedding` when tied. As it was loaded, whatever `logits` computes with.
        layers, norm, rotary: The parts.
        fingerprint: Identifies configuration and weights.
        fused: What runs in place of the layers' own operations, or None.
        kv_dtype: Of K and V in pools that are made for it; None: `dtype`.
    """

    kv_dtype: torch.dtype | None = None
    fused: FusedForward | None = None

    def __init__(
        self,
        config: ModelConfig,
        embedding: torch.Tensor,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        lm_head: torch.Tensor,
        fingerprint: str,
    ) -> None:
        self.config = config
        self.device = embedding.device
        self.dtype = embedding.dtype
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.lm_head = lm_head
        self._head = Linear(lm_head)
        self.rotary = RotaryEmbedding(config.rope, config.rotary_dim, self.device, self.dtype)
        self.fingerprint = fingerprint
        self._fuse()

    def _fuse(self) -> None:
        if can_fuse(self.layers, self.device, self.dtype):
            self.fused = FusedForward(self.layers, self.embedding, self.norm, self._head)

    @torch.inference_mode()
    def quantize_fp8(self) -> None:
        """Keep the layers' projections in FP8 from now on, with a scale per output channel, and compute logits by such a copy of the head.

        The embedding stays as it is, and so does the wide output head: drafts borrow it, and the embedding may be the same tensor. To be
        called before the first pass: recorded graphs would still read the old weights.

        Raises:
            ConfigurationError: Layers of another kind than dense ones with plain attention; fp32 weights on a CPU; a share of a model.
        """
        try:
            for layer in self.layers:
                quantize_layer(layer)
            head = Fp8Linear.of(self._head)
        except TypeError as error:
            raise ConfigurationError(
                f"quantization fp8: {error}. Serve this model without it.", field="quantization"
            ) from error
        self.use_rounded(head)
        self._fuse()

    def use_rounded(self, head: Linear) -> None:
        """Compute logits by this head from now on, as part of rounding the decoder's products to FP8; `lm_head` stays as it is."""
        self._head = head
        self.fingerprint = hashlib.sha256(f"{self.fingerprint} fp8".encode()).hexdigest()

    @property
    def weight_bytes(self) -> int:
        """Bytes of embedding, output head, its rounded copy and projections (norms are negligible)."""
        layers = sum(layer.attention.nbytes + layer.mlp.nbytes for layer in self.layers)
        rounded = self._head.nbytes if self._head.rounded else 0
        return self.embedding.nbytes + self.lm_head.nbytes + rounded + layers

    @property
    def computed_by(self) -> str:
        """What computes the layers, in a few words for the log."""
        return "torch's operations" if self.fused is None else "fused kernels"

    @property
    def cached(self) -> ModelConfig:
        """What K and V this process keeps, as a configuration."""
        return self.config

    def make_pool(self, num_pages: int, page_size: int, feature_size: int = 0) -> KVPool:
        """Make a pool of this decoder's shape on its device."""
        return self._pool_of(KVPool, num_pages, page_size, feature_size)

    def _pool_of(self, kind: type[Pool], num_pages: int, page_size: int, feature_size: int) -> Pool:
        kept = self.cached
        return kind(
            num_pages, page_size, kept.num_layers, kept.num_kv_heads, kept.head_dim, self.dtype, self.device, feature_size,
            latent=kept.latent is not None, kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def token_bytes(self, feature_size: int = 0) -> int:
        """Return the bytes that a token takes in this process's part of the pool, with a feature row of that width."""
        kept = self.cached
        return token_bytes(
            kept.num_layers, kept.num_kv_heads, kept.head_dim, self.dtype, feature_size,
            latent=kept.latent is not None, kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight that a draft may borrow, by its name in the checkpoint: the embedding or the output head.

        Raises:
            CheckpointError: Any other name.
        """
        if name == EMBEDDING:
            return self.embedding
        if name == LM_HEAD:
            return self.lm_head
        raise CheckpointError(f"{name} cannot be borrowed; {EMBEDDING} and {LM_HEAD} can.", field=name)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of ``tokens [rows]``: ``[rows, hidden_size]``."""
        return functional.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
        aux_layer_ids: Sequence[int] = (),
    ) -> DecoderOutput:
        """Run all layers over the rows of a planned step.

        Args:
            tokens: ``[rows]``, int32 or int64.
            positions: ``[rows]``, rotary positions (a tree node's is its depth behind the root's).
            attention: `AttentionBackend.plan` was called for exactly these rows.
            pool: Read up to the batch's prefix, written at its slots.
            aux_layer_ids: Layers whose outputs are captured, ascending.
        """
        rotation = self.rotary(positions)
        if self.fused is not None and isinstance(attention, StoredAttention):
            return DecoderOutput(*self.fused.forward(tokens, rotation, attention, pool, aux_layer_ids))
        hidden = self.embed(tokens)
        aux: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, attention, pool)
            if index in aux_layer_ids:
                aux.append(hidden)
        assert len(aux) == len(aux_layer_ids), (
            f"aux layers {aux_layer_ids} of a decoder with {len(self.layers)}"
        )
        return DecoderOutput(hidden=self.norm(hidden), aux=torch.cat(aux, dim=-1) if aux else None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocab]`` for hidden rows ``[rows, hidden_size]`` after the final norm, in the weights' type.

        Whatever reads them widens each number as it takes it: a copy in fp32 would be the largest tensor of a round.
        """
        if self.fused is not None:
            return self.fused.logits(hidden)
        return self._head(hidden)

    def choose(
        self, hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return `choose_tokens` of the rows' logits: ``[rows] int64``."""
        return choose_tokens(self.logits(hidden), sampling, positions)


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return what ``dtype auto`` means: bf16 on CUDA, fp32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
