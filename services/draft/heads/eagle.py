"""EAGLE-1/2 draft head: decoder layers over pairs of (embedding of token t + 1, feature of token t).

Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858) and their official code. The feature is the
target's last hidden state after its final norm.

    h0 = fc([embed(token) ; feature])                the embedding comes first
    h1 = h0 + Attention(h0)                          layer 0 has no input_layernorm; later layers do
    h  = h1 + MLP(post_attention_layernorm(h1))
    logits = lm_head(h)                              the target's lm_head, without a norm before it
    next feature = h

A head in Mistral's own format differs in two ways: layer 0 has an input norm, and a final norm is applied to
h (`mistral_format`).
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from outrider.kernels.add_norm import normalise
from outrider.kernels.head_input import head_input
from outrider.kernels.stream import ResidualStream
from outrider.services.draft.growth.recurrent_head import Ends
from outrider.services.draft.heads.files.eagle_config import EagleConfig
from outrider.services.draft.heads.files.hot_vocab import HOT_IDS, take_hot_ids
from outrider.services.draft.heads.files.keys import HeadKeys, canonical_names, layer_shapes
from outrider.services.draft.heads.files.mistral_format import is_native
from outrider.services.draft.heads.fused import FusedHead, fuse, runs_fused
from outrider.services.draft.heads.loaded import LoadedHead
from outrider.services.draft.heads.tables import TokenTables
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader, TensorShape
from outrider.shared.nn.fused.products import HasProducts, ProductUse
from outrider.shared.nn.layers.modules import DecoderLayer, RMSNorm
from outrider.shared.nn.layers.rope import Rotation
from outrider.shared.spec.drafter import FeatureSpec

RAW_FEATURES = "final_hidden"
"""Fingerprint of raw features, which do not depend on any weights of the head."""


class EagleHead(LoadedHead, HasProducts):
    """An EAGLE-1/2 head. Create it with `load`."""

    algorithm = "EAGLE"

    def __init__(
        self, config: EagleConfig, reader: CheckpointReader, keys: HeadKeys, vocabulary: DraftVocabulary
    ) -> None:
        layer = config.layer
        super().__init__(layer, reader, vocabulary)
        self.config = config
        self._fc = keys.take_linear(reader, ["fc"])
        self._first_norm = _optional_norm(keys, reader, "layers.0.input_layernorm.weight", layer.rms_norm_eps)
        self._first_attention = keys.take_attention(reader, layer, 0)
        self._first_post_norm = keys.take_norm(
            reader, "layers.0.post_attention_layernorm.weight", layer.rms_norm_eps
        )
        self._first_mlp = keys.take_mlp(reader, layer, 0)
        self._layers = [
            DecoderLayer(
                keys.take_norm(reader, f"layers.{index}.input_layernorm.weight", layer.rms_norm_eps),
                keys.take_attention(reader, layer, index),
                keys.take_norm(reader, f"layers.{index}.post_attention_layernorm.weight", layer.rms_norm_eps),
                keys.take_mlp(reader, layer, index),
            )
            for index in range(1, layer.num_layers)
        ]
        self._norm = _optional_norm(keys, reader, "norm.weight", layer.rms_norm_eps)
        self._tables = TokenTables(
            layer,
            reader,
            vocabulary,
            keys.take_if_there(reader, "embed_tokens.weight"),
            None,
            target_hidden_size=layer.hidden_size,
        )

    @classmethod
    def load(
        cls, path: Path, device: torch.device, dtype: torch.dtype, token_map: torch.Tensor | None = None
    ) -> tuple[EagleHead, HeadKeys]:
        """Read an EAGLE-1/2 head from its folder. A tensor in the folder must be used or explicitly ignored.

        Args:
            path: Folder of the head.
            device, dtype: Device and dtype to compute with.
            token_map: The target ids that the head may draft (FR-Spec). With None, the head drafts all ids.

        Raises:
            CheckpointError: The head's checkpoint is not usable. The message names the key or tensor, and the
                fix.
        """
        with CheckpointReader(path, device=device, dtype=dtype) as reader:
            config = EagleConfig.from_dir(path, native=is_native(reader.names))
            keys = _resolve(reader, config)
            size = config.layer.vocab_size
            vocabulary = DraftVocabulary.from_token_map(
                take_hot_ids(reader, keys, token_map, config.hot_vocab_size, size), size
            )
            head = cls(config, reader, keys, vocabulary)
            reader.finish(ignored=list(keys.ignored))
        return head, keys

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        # The target sends raw features. It cannot apply `fc` to them in advance, because `fc` also reads the
        # embedding.
        if target is not None:
            self.config.check_target(target)
        return FeatureSpec(final_hidden=True, feature_size=self.hidden_size, fingerprint=RAW_FEATURES)

    def forward(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        rotation: Rotation,
        attention: AttentionBackend,
        pool: KVPool,
        source: torch.Tensor | None = None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        if features.is_cuda:
            pair, _ = head_input(tokens, self._tables.embedding, features, source, None, None, 0.0)
        else:
            features = features if source is None else features.index_select(0, source)
            pair = torch.cat([self._tables.embed(tokens), features], dim=-1)  # [rows, 2 * hidden]
        mixed = self._fc(pair)  # [rows, hidden]
        entering = mixed if self._first_norm is None else self._first_norm(mixed)
        if self._fused is not None and isinstance(attention, StoredAttention):
            stream = self._fused.forward(
                ResidualStream(mixed, entering, None, 0.0), rotation, attention, pool, ends
            )
            return stream.residual if self._norm is None else normalise(stream)
        hidden = self._first_attention(entering, mixed, rotation, attention, pool)
        hidden = self._first_mlp(self._first_post_norm(hidden), hidden)
        for layer in self._layers:
            hidden = layer(hidden, rotation, attention, pool)
        hidden = hidden if ends is None else ends.of(hidden).contiguous()
        return hidden if self._norm is None else self._norm(hidden)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._tables.logits(states) if self._fused is None else self._fused.logits(states)

    def uses(self) -> list[ProductUse]:
        return [] if self._fused is None else self._fused.uses()

    @cached_property
    def _fused(self) -> FusedHead | None:
        """The fused GPU path, or None. The first read builds the path, so no tensor may be missing then."""
        if not runs_fused(self.device, self.dtype):
            return None
        last = self._first_post_norm if self._norm is None else self._norm
        return fuse(
            (self._first_attention, self._first_mlp),
            self._first_post_norm,
            self._layers,
            last,
            self._tables.lm_head,
        )


def _optional_norm(keys: HeadKeys, reader: CheckpointReader, name: str, eps: float) -> RMSNorm | None:
    return keys.take_norm(reader, name, eps) if name in keys else None


def _resolve(reader: CheckpointReader, config: EagleConfig) -> HeadKeys:
    """Match the names and shapes of a checkpoint's tensors against its configuration."""
    layer = config.layer
    hidden = layer.hidden_size
    stored = canonical_names(reader)
    shapes: dict[str, TensorShape] = {"fc.weight": (hidden, 2 * hidden)}
    ignored = {"lm_head.weight": "EAGLE-1/2 heads draft with the target's lm_head"}
    if config.fc_bias and "fc.weight" in stored and "fc.bias" not in stored:
        raise CheckpointError(
            f"{reader.path}: the tensor fc.bias is missing. If the head's fc has no bias, "
            'add "bias": false to its config.json; otherwise download the checkpoint again.',
            field="fc.bias",
        )
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    else:
        ignored["fc.bias"] = 'config.json sets "bias": false'
    for index in range(layer.num_layers):
        shapes |= layer_shapes(layer, index, hidden, stored, qkv_bias=config.qkv_bias)
        if index or config.first_norm:
            shapes[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    if "embed_tokens.weight" in stored:
        shapes["embed_tokens.weight"] = (layer.vocab_size, hidden)
    if config.is_mistral:
        shapes["norm.weight"] = (hidden,)
    if HOT_IDS in stored:
        shapes[HOT_IDS] = reader.tensors[stored[HOT_IDS]].shape[:1] or (1,)
    return HeadKeys.match(reader, stored, shapes, ignored, (HOT_IDS,), layer.head_dim)
