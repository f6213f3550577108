"""`DraftModel`: the interface of models that draft with K/V of their own (recurrent heads and decoders).

The row counts of a model's passes are fixed in advance, so that a whole round can be one CUDA graph.
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
    """One pass of a model over rows. The caller plans the attention before the call.

    In a pass over a level of a tree, the features are the states of the previous level.
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
    """A model that extends sessions and grows trees.

    A model that runs all levels of a tree in the same way has one stage. A chain of MTP layers has one stage
    for each layer; see `growth.stages`.

    Attributes:
        vocabulary: The tokens that the logits range over.
        device, dtype: Device and dtype of the model.
        hidden_size: Width of the states.
        lead: The number of a sequence's stable rows minus the number of its committed tokens, not counting
            the root; see `kernels.round_plan`.
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
        """Return one pass for each row count in `widths`.

        Args:
            positions: ``[sum(widths)] int32``, positions of the rows of all passes.
            widths: Number of rows of each pass.
            stages: For each pass, the stage that runs it.
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
    """A decoder, whose rows are tokens.

    The decoder takes no features. A row reads everything about its ancestors from the ancestors' K/V, so
    states serve only to compute logits.

    Args:
        decoder: The decoder that drafts.
        vocabulary: The token ids that the draft model and the target have in common.
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
