"""EAGLE-3: one decoder layer over the pair (embedding of token t + 1, feature of t). Source: arXiv 2503.01840 and its official code.

    r  = projected target feature, or this head's own state of the row before
    x  = [input_layernorm(embed(token)) ; hidden_norm(r)]             q, k, v take 2h
    h1 = r + Attention(x);   h = h1 + MLP(post_attention_layernorm(h1))
    logits = lm_head(norm(h)) over the draft vocabulary;   next feature = h, before the norm

The projection of the target's features (``fc`` and its norms) runs on the target, so every feature that arrives here has width h.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn import functional

from outrider.services.draft.heads.eagle3_config import Eagle3Config
from outrider.services.draft.heads.eagle3_keys import Eagle3Keys
from outrider.services.draft.strategy import TargetInfo
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.layers import Attention, GatedMLP, Linear, RMSNorm
from outrider.shared.nn.loader import CheckpointReader
from outrider.shared.nn.rope import RotaryEmbedding, Rotation
from outrider.shared.spec.drafter import FeatureSpec

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class Eagle3Head:
    """An EAGLE-3 head; implements `RecurrentHead`. Make it by `load`."""

    algorithm = "EAGLE3"
    num_layers = 1

    def __init__(self, config: Eagle3Config, reader: CheckpointReader, keys: Eagle3Keys) -> None:
        layer = config.layer
        self.config = config
        self.device = reader.device
        self.dtype = reader.dtype or torch.float32
        self.hidden_size = layer.hidden_size
        self.kv_heads = layer.num_kv_heads
        self.head_dim = layer.head_dim
        self.fingerprint = f"{layer.fingerprint[:32]}{reader.fingerprint[:32]}"
        self._rope = RotaryEmbedding(layer.rope, layer.head_dim, self.device, self.dtype)
        self.vocabulary = keys.take_vocabulary(reader)
        self._load_layer(reader, keys)
        self._projector = keys.take_projector(reader)
        self._projector_fingerprint = _fingerprint(self._projector, layer.rms_norm_eps)
        self._embedding = keys.take_embedding(reader)
        self._lm_head = keys.take_lm_head(reader, self.vocabulary)
        if self._lm_head is None and layer.tie_word_embeddings and self._embedding is not None:
            self._lm_head = Linear(self._embedding[self.vocabulary.target_ids(self.device)])
        self._missing: dict[str, tuple[int, ...]] = {}
        if self._embedding is None:
            self._missing[EMBEDDING] = (layer.vocab_size, config.target_hidden_size)
        if self._lm_head is None:
            self._missing[LM_HEAD] = (layer.vocab_size, config.target_hidden_size)
        if self._missing and config.target_hidden_size != layer.hidden_size:
            name = next(iter(self._missing))
            raise CheckpointError(
                f"{reader.path}: the head has no {name} of its own and cannot borrow the target's: its hidden_size is {layer.hidden_size}, "
                f"target_hidden_size {config.target_hidden_size}. Export the head with {name}.",
                field=name,
            )

    @classmethod
    def load(cls, path: Path, device: torch.device, dtype: torch.dtype) -> tuple[Eagle3Head, Eagle3Keys]:
        """Read a head's folder strictly: every tensor is used, or ignored by name (`Eagle3Keys.ignored`).

        Raises:
            CheckpointError: naming the key or tensor, and the fix.
        """
        config = Eagle3Config.from_dir(path)
        with CheckpointReader(path, device=device, dtype=dtype) as reader:
            keys = Eagle3Keys.resolve(reader, config)
            head = cls(config, reader, keys)
            reader.finish(ignored=keys.ignored)
        return head, keys

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """See `DraftStrategy.feature_spec`."""
        return FeatureSpec(
            aux_layer_ids=self.config.check_target(target) if target is not None else self.config.aux_layer_ids or (),
            feature_size=self.hidden_size,
            projector=self._projector,
            norm_eps=self.config.layer.rms_norm_eps,
            fingerprint=self._projector_fingerprint,
        )

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """See `DraftStrategy.missing`."""
        return dict(self._missing)

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """See `DraftStrategy.lend`."""
        shape = self._missing.get(name)
        if shape is None:
            raise CheckpointError(f"{name} is not wanted; missing: {', '.join(self._missing) or 'nothing'}.", field=name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} is {list(tensor.shape)}, must be {list(shape)}.", field=name)
        tensor = tensor.to(device=self.device, dtype=self.dtype)
        if name == EMBEDDING:
            self._embedding = tensor
        else:
            self._lm_head = Linear(tensor if self.vocabulary.d2t is None else tensor[self.vocabulary.target_ids(self.device)])
        del self._missing[name]

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """See `RecurrentHead.rotation`."""
        return self._rope(positions)

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, rotation: Rotation, attention: AttentionBackend, pool: KVPool
    ) -> torch.Tensor:
        """See `RecurrentHead.forward`."""
        assert self._embedding is not None, "the embedding is missing; lend() it first"
        normed = self._hidden_norm(features)
        pair = torch.cat([self._input_norm(functional.embedding(tokens, self._embedding)), normed], dim=-1)  # [rows, 2 * hidden]
        residual = normed if self.config.norm_before_residual else features
        hidden = self._attention(pair, residual, rotation, attention, pool)
        hidden = self._mlp(self._post_attention_norm(hidden), hidden)
        return self._norm(hidden) if self.config.norm_output else hidden

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `RecurrentHead.logits`."""
        assert self._lm_head is not None, "lm_head is missing; lend() it first"
        return self._lm_head(states if self.config.norm_output else self._norm(states))

    def _load_layer(self, reader: CheckpointReader, keys: Eagle3Keys) -> None:
        layer = self.config.layer

        def norm(name: str) -> RMSNorm:
            return RMSNorm(reader.take(*keys.named(name)), layer.rms_norm_eps)

        self._input_norm = norm("layers.0.input_layernorm.weight")
        self._hidden_norm = norm("layers.0.hidden_norm.weight")
        self._post_attention_norm = norm("layers.0.post_attention_layernorm.weight")
        self._norm = norm("norm.weight")
        qkv = [keys.named(f"layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
        self._attention = Attention(
            Linear(reader.take_rows(qkv)),
            Linear(reader.take(*keys.named("layers.0.self_attn.o_proj.weight"))),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer=0,
        )
        gate_up = [keys.named(f"layers.0.mlp.{part}_proj.weight") for part in ("gate", "up")]
        down = Linear(reader.take(*keys.named("layers.0.mlp.down_proj.weight")))
        self._mlp = GatedMLP(Linear(reader.take_rows(gate_up)), down, layer.activation)


def _fingerprint(projector: Mapping[str, torch.Tensor], norm_eps: float) -> str:
    """Identify a projector: stored features are valid for this value only."""
    digest = hashlib.sha256(repr(norm_eps).encode())
    for name in sorted(projector):
        tensor = projector[name].to("cpu")
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
