"""`DraftModel`: the interface of draft models with K/V of their own (recurrent heads and decoders).

The number of rows in each pass of a model is fixed in advance. A whole round can therefore be one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.services.draft.growth.recurrent_head import Ends, RecurrentHead
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.layers.modules import Linear
from outrider.shared.nn.layers.rope import Rotation


class DraftPass(Protocol):
    """A function that runs one pass of a draft model over a fixed number of rows.

    The caller must plan the attention before the call. If the rows are one level of a draft tree, the
    features are the model's states of the previous level.
    """

    def __call__(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        source: torch.Tensor | None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """Return the states ``[rows, hidden]`` of the rows that `ends` selects, or of all rows.

        Args:
            tokens: ``[rows] int32``.
            features: ``[m, width]``.
            source: ``[rows] int32``, each row's index into `features`. With None, row i uses feature i.
            ends: The rows whose states are wanted; see `RecurrentHead.forward`.
        """
        ...


class DraftModel(Protocol):
    """A draft model that extends sessions and grows their trees.

    A model that runs all levels of a tree in the same way has one stage. A chain of MTP layers has one stage
    for each layer; see `growth.stages`.

    Attributes:
        vocabulary: The tokens that the logits range over.
        device, dtype: Device and dtype of the model.
        hidden_size: Width of the model's states.
        lead: 1 if the model computes one row per committed token, as a decoder does. 0 if it computes one row
            fewer.
        stages: Number of stages, each with K/V of its own.
    """

    vocabulary: DraftVocabulary
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    lead: int
    stages: int

    def stage(self, level: int) -> int:
        """Return the stage that runs a level of the tree. Levels are counted from 1."""
        return min(level, self.stages - 1)

    def passes(
        self,
        positions: torch.Tensor,
        widths: Sequence[int],
        stages: Sequence[int],
        attention: AttentionBackend,
        pool: KVPool,
    ) -> list[DraftPass]:
        """Return one pass of the draft model for each row count in `widths`.

        Args:
            positions: ``[sum(widths)] int32``, positions of the rows of all passes.
            widths: Number of rows of each pass.
            stages: For each pass, the index of the model's stage that runs the pass.
            attention: Attention backend of the model.
            pool: KV pool of the model.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[rows, vocabulary.size]`` for ``states [rows, hidden]``."""
        ...


@dataclass(frozen=True, slots=True)
class _HeadPass:
    """A pass of a recurrent head."""

    head: RecurrentHead
    rotation: Rotation
    attention: AttentionBackend
    pool: KVPool

    def __call__(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        source: torch.Tensor | None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        return self.head.forward(tokens, features, self.rotation, self.attention, self.pool, source, ends)


@dataclass(frozen=True, slots=True)
class _DecoderPass:
    """A pass of a decoder, at ``positions [rows] int32``."""

    decoder: Decoder
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
        states = self.decoder.forward(tokens, self.positions, self.attention, self.pool).hidden
        return states if ends is None else ends.of(states).contiguous()


class HeadModel(DraftModel):
    """A recurrent head. The state of a row is the feature of the row's children."""

    lead = 0
    stages = 1

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        self.vocabulary = head.vocabulary
        self.device = head.device
        self.dtype = head.dtype
        self.hidden_size = head.hidden_size

    def passes(
        self,
        positions: torch.Tensor,
        widths: Sequence[int],
        stages: Sequence[int],
        attention: AttentionBackend,
        pool: KVPool,
    ) -> list[DraftPass]:
        rotations = split_rotation(self._head.rotation(positions), widths)
        return [_HeadPass(self._head, rotation, attention, pool) for rotation in rotations]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._head.logits(states)


class DecoderModel(DraftModel):
    """A draft model that is a decoder. Each input row is one token.

    The decoder takes no features. A row gets all information about its ancestors from their K/V. The states
    serve only to compute logits.

    Args:
        decoder: The decoder that drafts.
        vocabulary: The token ids that the decoder and the target have in common.
    """

    lead = 1
    stages = 1

    def __init__(self, decoder: Decoder, vocabulary: DraftVocabulary) -> None:
        self._decoder = decoder
        self.vocabulary = vocabulary
        self.device = decoder.device
        self.dtype = decoder.dtype
        self.hidden_size = decoder.config.hidden_size
        # The rows of the lm_head that may be drafted; None selects all rows.
        cut = vocabulary.size < decoder.config.vocab_size
        self._lm_head = Linear(decoder.lm_head[vocabulary.target_ids(decoder.device)]) if cut else None

    def passes(
        self,
        positions: torch.Tensor,
        widths: Sequence[int],
        stages: Sequence[int],
        attention: AttentionBackend,
        pool: KVPool,
    ) -> list[DraftPass]:
        return [
            _DecoderPass(self._decoder, rows, attention, pool)
            for rows in positions.split_with_sizes(list(widths))
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(states) if self._lm_head is None else self._lm_head(states)


def split_rotation(rotation: Rotation, widths: Sequence[int]) -> list[Rotation]:
    """Split the rotary angles of all rows by the row counts of the passes."""
    cos, sin = (part.split_with_sizes(list(widths)) for part in rotation)
    return [Rotation(*angles) for angles in zip(cos, sin, strict=True)]
