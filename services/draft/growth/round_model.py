"""The interface of a model that runs rounds on the device; adapters for recurrent heads and draft models.

The model provides passes whose row counts are fixed in advance, so that a whole round can be one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.services.draft.growth.recurrent_head import Ends, RecurrentHead
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.layers.rope import Rotation


class RoundPass(Protocol):
    """One pass over rows. The caller plans attention first.

    The features of a level are the states of the previous level.
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
            source: ``[rows] int32``, the index into `features` of each row. None means that row i uses
                feature i.
            ends: The rows whose states are wanted; see `RecurrentHead.forward`.
        """
        ...


class RoundModel(Protocol):
    """A model that runs all levels alike, with one K/V.

    Attributes:
        vocabulary: Vocabulary of the logits.
        device: Device of the model.
        lead: Number of stable rows of a sequence, minus the number of its committed tokens without the root;
            see `kernels.round_plan`.
    """

    vocabulary: DraftVocabulary
    device: torch.device
    lead: int

    def passes(
        self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool
    ) -> list[RoundPass]:
        """Return one pass for each row count in `widths`, at ``positions [sum(widths)] int32``."""
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


class HeadRounds(RoundModel):
    """Runs rounds with a recurrent head."""

    lead = 0

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        self.vocabulary = head.vocabulary
        self.device = head.device

    def passes(
        self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool
    ) -> list[RoundPass]:
        """Return one pass per width. The rotary angles of all rows are computed together."""
        cos, sin = (part.split_with_sizes(list(widths)) for part in self._head.rotation(positions))
        return [
            _HeadPass(self._head, Rotation(*angles), attention, pool) for angles in zip(cos, sin, strict=True)
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._head.logits(states)


class DecoderRounds(RoundModel):
    """Runs rounds with a decoder, whose rows are tokens.

    The decoder takes no features. Its states are used only to compute logits.

    Args:
        decoder: The draft model.
        vocabulary: Vocabulary of the logits.
        logits: The decoder's output head, reduced to the vocabulary.
    """

    lead = 1

    def __init__(
        self, decoder: Decoder, vocabulary: DraftVocabulary, logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._decoder = decoder
        self._logits = logits
        self.vocabulary = vocabulary
        self.device = decoder.device

    def passes(
        self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool
    ) -> list[RoundPass]:
        return [
            _DecoderPass(self._decoder, rows, attention, pool)
            for rows in positions.split_with_sizes(list(widths))
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._logits(states)
