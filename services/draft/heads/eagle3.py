"""The network of EAGLE-3 draft heads at inference. `Eagle3Head.load` reads a trained head from its folder.

The head's decoder layers read pairs (embedding of token t + 1, feature of token t). Source: EAGLE-3 (arXiv
2503.01840) and its official code.

    r  = the projected target feature, or this head's own state from the previous step
    x  = [input_layernorm(embed(token)) ; hidden_norm(r)]        q, k and v of layer 0 read 2 * hidden inputs
    h1 = r + Attention(x);   h = h1 + MLP(post_attention_layernorm(h1))
    later layers: h1 = h + Attention(hidden_norm(h));   h = h1 + MLP(post_attention_layernorm(h1))
    logits = lm_head(norm(h)) over the draft vocabulary
    next feature = h, or norm(h) if the head's configuration sets `norm_output`

The target projects the features before it sends them. For this projection, it uses the head's ``fc`` and the
norms of ``fc``. Every feature that this network receives therefore has the width ``hidden``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.kernels.add_norm import normalise, rms_norm
from outrider.kernels.head_input import Residual, feature_input, head_input
from outrider.kernels.rope_store import Lookup
from outrider.kernels.stream import ResidualStream
from outrider.services.draft.growth.recurrent_head import Ends
from outrider.services.draft.heads.embedded import EmbeddedTokens, embed_tokens
from outrider.services.draft.heads.files.eagle3_config import Eagle3Config
from outrider.services.draft.heads.files.eagle3_keys import (
    layer_norm_name,
    resolve,
    take_projector,
    take_vocabulary,
)
from outrider.services.draft.heads.files.keys import HeadKeys
from outrider.services.draft.heads.fused import FusedHead, fuse, runs_fused
from outrider.services.draft.heads.loaded import LoadedHead
from outrider.services.draft.heads.tables import EMBEDDING, LM_HEAD, TokenTables
from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.stored import StoredAttention
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.fused.products import HasProducts, ProductUse
from outrider.shared.nn.layers.modules import Attention, DecoderLayer
from outrider.shared.nn.layers.rope import Rotation
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.drafter import FeatureSpec

__all__ = ["EMBEDDING", "LM_HEAD", "Eagle3Head"]

log = get_logger("outrider.draft.heads")


class Eagle3Head(LoadedHead, HasProducts):
    """An EAGLE-3 head. Create it with `load`."""

    algorithm = "EAGLE3"

    def __init__(
        self, config: Eagle3Config, reader: CheckpointReader, keys: HeadKeys, vocabulary: DraftVocabulary
    ) -> None:
        layer, eps = config.layer, config.layer.rms_norm_eps
        super().__init__(layer, reader, vocabulary)
        self.config = config
        self._embedding_norm = keys.take_norm(reader, "layers.0.input_layernorm.weight", eps)
        self._hidden_norm = keys.take_norm(reader, "layers.0.hidden_norm.weight", eps)
        self._attention = keys.take_attention(reader, layer, 0)
        self._post_attention_norm = keys.take_norm(reader, "layers.0.post_attention_layernorm.weight", eps)
        self._mlp = keys.take_mlp(reader, layer, 0)
        self._layers = [
            DecoderLayer(
                keys.take_norm(reader, layer_norm_name(keys, index), eps),
                keys.take_attention(reader, layer, index),
                keys.take_norm(reader, f"layers.{index}.post_attention_layernorm.weight", eps),
                keys.take_mlp(reader, layer, index),
            )
            for index in range(1, layer.num_layers)
        ]
        self._norm = keys.take_norm(reader, "norm.weight", eps)
        self._projector = take_projector(reader, keys)
        self._logged_layers: tuple[int, ...] = ()
        self._projector_fingerprint = _fingerprint(self._projector, eps)
        embedding, lm_head = (
            keys.take_if_there(reader, name) for name in ("embed_tokens.weight", "lm_head.weight")
        )
        self._tables = TokenTables(layer, reader, vocabulary, embedding, lm_head, config.target_hidden_size)
        self._fused: FusedHead | None = None
        self._embedded: EmbeddedTokens | None = None
        self._settle()

    @classmethod
    def load(
        cls, path: Path, device: torch.device, dtype: torch.dtype, token_map: torch.Tensor | None = None
    ) -> tuple[Eagle3Head, HeadKeys]:
        """Read an EAGLE-3 head from its folder. A tensor in the folder must be used or explicitly ignored.

        Args:
            path: Folder of the head.
            device, dtype: Device and dtype to compute with.
            token_map: The target ids that a head with a full vocabulary may draft (FR-Spec). With None, the
                head drafts all ids.

        Raises:
            CheckpointError: The head's checkpoint is not usable. The message names the key or tensor, and the
                fix.
        """
        config = Eagle3Config.from_dir(path)
        with CheckpointReader(path, device=device, dtype=dtype) as reader:
            keys = resolve(reader, config)
            head = cls(config, reader, keys, take_vocabulary(reader, keys, config, token_map))
            reader.finish(ignored=list(keys.ignored))
        return head, keys

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        return FeatureSpec(
            aux_layer_ids=self._captured(target) if target is not None else self.config.aux.ids or (),
            final_hidden=self.config.final_hidden,
            feature_size=self.hidden_size,
            projector=self._projector,
            norm_eps=self.config.layer.rms_norm_eps,
            fingerprint=self._projector_fingerprint,
        )

    def _captured(self, target: TargetInfo) -> tuple[int, ...]:
        layers = self.config.check_target(target)
        # A target may ask again, for example when it reconnects. One line for the same layers is enough.
        if layers and layers != self._logged_layers:
            self._logged_layers = layers
            convention = self.config.aux_convention(target).value
            log.info(
                "aux layers selected",
                outputs_of=list(layers),
                convention=convention,
                layers=target.num_layers,
                family=target.model_type,
            )
        return layers

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        super().lend(name, tensor)
        self._settle()

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
        kind = Residual.NORMED_FEATURE if self.config.norm_before_residual else Residual.FEATURE
        # Path 1: fused kernels. A table contains the embedding's share of the first product (`embedded`).
        if self._fused is not None and self._embedded is not None and isinstance(attention, StoredAttention):
            # If the last pass computed the sums of squares of these features, no norm kernel is needed.
            stream = self._fused.stream_of(features) if source is None and self._embedded.folded else None
            if stream is None:
                normed, residual = feature_input(
                    features, source, self._embedded.norm, self._hidden_norm.eps, kind
                )
                stream = ResidualStream(residual, normed, None, 0.0)
            else:
                stream = ResidualStream(features, features, stream.sums, stream.eps)
            lookup = Lookup(self._embedded.table, tokens.contiguous())
            stream = self._fused.forward(stream, rotation, attention, pool, ends, lookup)
            return normalise(stream) if self.config.norm_output else stream.residual
        # Paths 2 and 3 read the pair [embedding ; feature]. Prepare this pair, and the residual that bypasses
        # layer 0.
        if features.is_cuda:
            norms = self._embedding_norm.weight, self._hidden_norm.weight
            pair, residual = head_input(
                tokens, self._tables.embedding, features, source, *norms, self._hidden_norm.eps, kind
            )
        else:
            features = features if source is None else features.index_select(0, source)
            normed = self._hidden_norm(features)
            pair = torch.cat(
                [self._embedding_norm(self._tables.embed(tokens)), normed], dim=-1
            )  # [rows, 2 * hidden]
            residual = normed if self.config.norm_before_residual else features
        # Path 2: fused kernels that compute the whole first product, because the table would be too large.
        if self._fused is not None and isinstance(attention, StoredAttention):
            stream = self._fused.forward(
                ResidualStream(residual, pair, None, 0.0), rotation, attention, pool, ends
            )
            return normalise(stream) if self.config.norm_output else stream.residual
        # Path 3: no fused kernels exist for this device or these layers.
        hidden = self._attention(pair, residual, rotation, attention, pool)
        hidden = self._mlp(self._post_attention_norm(hidden), hidden)
        for layer in self._layers:
            hidden = layer(hidden, rotation, attention, pool)
        hidden = hidden if ends is None else ends.of(hidden).contiguous()
        return self._norm(hidden) if self.config.norm_output else hidden

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        if self._fused is None:
            return self._tables.logits(states if self.config.norm_output else self._norm(states))
        stream = self._fused.stream_of(states)
        if stream is not None:
            return self._fused.stream_logits(stream)
        return self._fused.logits(
            states if self.config.norm_output else rms_norm(states, self._norm.weight, self._norm.eps)
        )

    def uses(self) -> list[ProductUse]:
        return [] if self._fused is None else self._fused.uses()

    def _settle(self) -> None:
        """Build the fused GPU path once no borrowed tensor is missing."""
        if self.missing() or not runs_fused(self.device, self.dtype):
            return
        if type(self._attention) is Attention:
            fold = not self.config.norm_before_residual
            self._embedded = embed_tokens(
                self._attention, self._embedding_norm, self._tables.embedding, self._hidden_norm, fold=fold
            )
        attention = self._attention
        if self._embedded is not None:
            attention = self._embedded.attention
            log.info("embedding products precomputed", mib=round(self._embedded.table.nbytes / 2**20))
        self._fused = fuse(
            (attention, self._mlp), self._post_attention_norm, self._layers, self._norm, self._tables.lm_head
        )


def _fingerprint(projector: Mapping[str, torch.Tensor], norm_eps: float) -> str:
    """Return the projector's fingerprint. Stored features are valid only while this value is the same."""
    digest = hashlib.sha256(repr(norm_eps).encode())
    for name in sorted(projector):
        tensor = projector[name].to("cpu")
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
