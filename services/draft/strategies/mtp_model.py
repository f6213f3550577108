"""A chain of MTP layers as a draft model: one stage per layer, with the target's embedding and lm_head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from outrider.services.draft.growth.draft_model import DraftModel, DraftPass, split_rotation
from outrider.services.draft.growth.recurrent_head import Ends
from outrider.services.draft.strategies.mtp_layers import MtpWeights
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.base.errors import CheckpointError
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import EMBEDDING, LM_HEAD
from outrider.shared.nn.layers.modules import Linear
from outrider.shared.nn.layers.rope import RotaryEmbedding, Rotation


class MtpModel(DraftModel):
    """A draft model that is a chain of MTP layers. Each layer is one stage of the tree's growth.

    Args:
        weights: The layers.
        device, dtype: Device and dtype to compute with.
        token_map: The target ids that the model may draft. With None, it may draft all ids.
    """

    lead = 0

    def __init__(
        self,
        weights: MtpWeights,
        device: torch.device,
        dtype: torch.dtype,
        token_map: torch.Tensor | None = None,
    ) -> None:
        config = weights.config
        self.weights = weights
        self.device = device
        self.dtype = dtype
        self.hidden_size = config.hidden_size
        self.stages = len(weights.layers)
        self.vocabulary = DraftVocabulary.from_token_map(token_map, config.vocab_size)
        self._rope = RotaryEmbedding(config.rope, config.rotary_dim, device, dtype)
        self._embedding: torch.Tensor | None = None
        self._lm_head: Linear | None = None

    def make_pool(self, num_pages: int, page_size: int) -> KVPool:
        """Create a pool with a plane, or a pair of planes for K and V, for each layer."""
        config = self.weights.config
        return KVPool(
            num_pages, page_size, self.stages, config.num_kv_heads, config.head_dim, self.dtype, self.device,
            latent=config.latent is not None,
        )  # fmt: skip

    def bytes_per_token(self, page_size: int) -> int:
        """Return the bytes that one token takes: its K/V, and its share of the `StageStates` of a page."""
        states = (self.stages - 1) * self.hidden_size * self.dtype.itemsize
        return self.make_pool(1, page_size).bytes_per_token + -(-states // page_size)

    def missing(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors still to be borrowed: the target's embedding and lm_head."""
        shape = (self.weights.config.vocab_size, self.weights.config.hidden_size)
        return {
            name: shape
            for name, held in ((EMBEDDING, self._embedding), (LM_HEAD, self._lm_head))
            if held is None
        }

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor borrowed from the target.

        Raises:
            CheckpointError: The tensor is not missing, or its shape is wrong.
        """
        shape = self.missing().get(name)
        if shape is None:
            raise CheckpointError(
                f"The MTP layers do not borrow {name}; still missing: "
                f"{', '.join(self.missing()) or 'nothing'}.",
                field=name,
            )
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"The target's {name} has shape {list(tensor.shape)}, but the MTP layers need {list(shape)}. "
                "Serve the target that the layers belong to.",
                field=name,
            )
        tensor = tensor.to(device=self.device, dtype=self.dtype)
        if name == EMBEDDING:
            self._embedding = tensor
        else:
            self._lm_head = Linear(
                tensor if self.vocabulary.d2t is None else tensor[self.vocabulary.target_ids(self.device)]
            )

    def passes(
        self,
        positions: torch.Tensor,
        widths: Sequence[int],
        stages: Sequence[int],
        attention: AttentionBackend,
        pool: KVPool,
    ) -> list[DraftPass]:
        rotations = split_rotation(self._rope(positions), widths)
        parts = positions.split_with_sizes(list(widths))
        return [
            _MtpPass(self, layer, rotation, rows, attention, pool)
            for layer, rotation, rows in zip(stages, rotations, parts, strict=True)
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        assert self._lm_head is not None, "lm_head is missing; lend() it first"
        return self._lm_head(states)

    def run(
        self,
        layer: int,
        tokens: torch.Tensor,
        states: torch.Tensor,
        rotation: Rotation,
        positions: torch.Tensor,
        attention: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:
        """Run one layer over rows ``tokens, positions [rows]`` and ``states [rows, hidden]``.

        The attention backend must be planned for these rows.
        """
        assert self._embedding is not None, "the embedding is missing; lend() it first"
        embedded = functional.embedding(tokens, self._embedding)
        if self.weights.dialect.blind_start:
            # These families treat the embedding at position 0 as zero.
            embedded = embedded * (positions != 0)[:, None]
        return self.weights.layers[layer](embedded, states, rotation, attention, pool)


@dataclass(frozen=True, slots=True)
class _MtpPass:
    """A pass of one layer over rows at ``positions [rows] int32``."""

    model: MtpModel
    layer: int
    rotation: Rotation
    positions: torch.Tensor
    attention: AttentionBackend
    pool: KVPool

    def __call__(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        source: torch.Tensor | None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        states = features if source is None else features.index_select(0, source)
        out = self.model.run(
            self.layer, tokens, states, self.rotation, self.positions, self.attention, self.pool
        )
        return out if ends is None else ends.of(out).contiguous()
