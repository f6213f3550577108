"""The decoder of all target families: the forward pass over paged K/V, the logits, and the pool's shape."""

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
from outrider.shared.nn.layers.fp8_linear import Fp8Linear, quantize_layer
from outrider.shared.nn.layers.load import load_attention, load_layer, load_mlp
from outrider.shared.nn.layers.modules import DecoderLayer, Linear, RMSNorm
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
OnProgress = Callable[[int, int], None]
"""A function that is called with the number of bytes loaded so far and the total number of bytes."""
OnLayer = Callable[[DecoderLayer], None]
"""A function that changes a layer right after it is loaded, so that the next layer can use the memory."""


@dataclass(frozen=True, slots=True)
class DecoderOutput:
    """Result of a decoder's forward pass.

    Attributes:
        hidden: ``[rows, hidden_size]``, the hidden states after the final norm. They are the input of
            `Decoder.logits`.
        aux: ``[rows, n_aux * hidden_size]``, the residual stream after each captured layer. None if no layer
            was captured.
    """

    hidden: torch.Tensor
    aux: torch.Tensor | None


class Decoder:
    """A decoder-only language model: embedding, decoder layers, final norm and output head.

    A decoder has no state of its own, because K/V is stored in the pool that is passed to each call.

    Attributes:
        config, device, dtype: The configuration, the device, and the type of weights and activations.
        embedding: ``[vocab, hidden]``.
        lm_head: ``[vocab, hidden]``, the output head in the type in which it was loaded. `logits` may use an
            FP8 copy of this tensor. If the weights are tied, `lm_head` is the same tensor as `embedding`.
        layers, norm, rotary: The decoder layers, the final norm and the rotary embedding.
        fingerprint: Identifies the configuration and the weights.
        fused: Fused kernels that replace the layers' own operations, or None.
        kv_dtype: Type of K and V in the decoder's KV pools. With None, the type is `dtype`.
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
        """Convert the layers' projections to FP8, and use an FP8 copy of the output head to compute logits.

        Each output channel of a weight has a scale. The embedding and `lm_head` are not changed, because
        draft models may borrow these tensors. Call this method before the first forward pass. CUDA graphs
        that are already recorded would still read the old weights.

        Raises:
            ConfigurationError: The layers do not consist of plain attention and a dense MLP, the weights are
                fp32 on a CPU, or this process has only a share of the model.
        """
        try:
            for layer in self.layers:
                quantize_layer(layer)
            head = Fp8Linear.of(self._head)
        except TypeError as error:
            raise ConfigurationError(
                f"quantization fp8: {error}. Leave --quantization out for this model.", field="quantization"
            ) from error
        self.use_rounded(head)
        self._fuse()

    def use_rounded(self, head: Linear) -> None:
        """From now on, use `head`, an FP8 copy of the output head, for logits. `lm_head` does not change."""
        self._head = head
        self.fingerprint = hashlib.sha256(f"{self.fingerprint} fp8".encode()).hexdigest()

    @property
    def rounded(self) -> bool:
        """True if products are computed with FP8 weights, as `--quantization fp8` requires."""
        return self._head.rounded

    @property
    def weight_bytes(self) -> int:
        """Bytes of the embedding, output head, FP8 copy of the head and projections, without the norms."""
        layers = sum(layer.attention.nbytes + layer.mlp.nbytes for layer in self.layers)
        rounded = self._head.nbytes if self._head.rounded else 0
        return self.embedding.nbytes + self.lm_head.nbytes + rounded + layers

    @property
    def computed_by(self) -> str:
        """Short description of how the layers are computed, for the log."""
        return "torch's operations" if self.fused is None else "fused kernels"

    @property
    def cached(self) -> ModelConfig:
        """Configuration that describes the K/V stored by this process."""
        return self.config

    def make_pool(self, num_pages: int, page_size: int, feature_size: int = 0) -> KVPool:
        """Create a KV pool of this decoder's shape on its device."""
        return self._pool_of(KVPool, num_pages, page_size, feature_size)

    def _pool_of(self, kind: type[Pool], num_pages: int, page_size: int, feature_size: int) -> Pool:
        kept = self.cached
        return kind(
            num_pages, page_size, kept.num_layers, kept.num_kv_heads, kept.head_dim, self.dtype, self.device,
            feature_size, latent=kept.latent is not None, kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def token_bytes(self, feature_size: int = 0) -> int:
        """Return the number of bytes that one token occupies in this process's part of the KV pool.

        Args:
            feature_size: Width of the feature row that is stored with each token for a drafter (see
                `FeatureProjector`).
        """
        kept = self.cached
        return token_bytes(
            kept.num_layers, kept.num_kv_heads, kept.head_dim, self.dtype, feature_size,
            latent=kept.latent is not None, kv_dtype=self.kv_dtype,
        )  # fmt: skip

    def weight(self, name: str) -> torch.Tensor:
        """Return a weight that a draft model may borrow: the embedding or the output head.

        Args:
            name: The weight's name in the checkpoint.

        Raises:
            CheckpointError: `name` is neither the embedding nor the output head.
        """
        if name == EMBEDDING:
            return self.embedding
        if name == LM_HEAD:
            return self.lm_head
        raise CheckpointError(
            f"{name} cannot be borrowed; only {EMBEDDING} and {LM_HEAD} can. "
            "Use a draft head that contains the tensor.",
            field=name,
        )

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
        """Run one forward pass: all layers over the rows (tokens) for which attention is planned.

        Args:
            tokens: ``[rows]``, int32 or int64.
            positions: ``[rows]``, rotary positions. The position of a tree node is the position of the root
                plus the depth of the node.
            attention: Attention backend whose `plan` was called with exactly these rows.
            pool: KV pool that contains the K/V of earlier tokens. The K/V of the rows is written to the KV
                slots of the planned batch.
            aux_layer_ids: Indices of the layers whose outputs are returned as `aux`, in ascending order.
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
            f"aux layers {aux_layer_ids} of a decoder with {len(self.layers)} layers"
        )
        return DecoderOutput(hidden=self.norm(hidden), aux=torch.cat(aux, dim=-1) if aux else None)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits ``[rows, vocab]`` of hidden states, in the type of the weights.

        No fp32 copy of the logits is made, because the copy would be the largest tensor of a round. The
        kernels that read logits convert each number to fp32 when they load the number.

        Args:
            hidden: ``[rows, hidden_size]``, hidden states after the final norm.
        """
        if self.fused is not None:
            return self.fused.logits(hidden)
        return self._head(hidden)

    def choose(
        self, hidden: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens ``[rows] int64`` that `choose_tokens` chooses from the logits of these rows."""
        return self.choose_from(self.logits(hidden), sampling, positions)

    def choose_from(
        self, logits: torch.Tensor, sampling: SamplingTensors, positions: torch.Tensor
    ) -> torch.Tensor:
        """Choose tokens like `choose`, but from logits that `logits` has returned."""
        return choose_tokens(logits, sampling, positions)


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return the type that the setting ``dtype auto`` means: bf16 on CUDA, fp32 elsewhere."""
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
