"""What a drafting round on the device needs of a model: passes over rows whose numbers and places are known without the host."""

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
    """One pass over rows. Attention is planned before. The features of a level are the states of the level before."""

    def __call__(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        source: torch.Tensor | None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """Return states ``[rows, hidden]`` of the rows that `ends` wants, or of all.

        Args:
            tokens: ``[rows] int32``.
            features: ``[m, width]``.
            source: ``[rows] int32``, which of them each row takes; None: each its own.
            ends: See `RecurrentHead.forward`.
        """
        ...


class RoundModel(Protocol):
    """A model that runs all levels alike, with one K/V.

    Attributes:
        vocabulary: What its logits range over.
        device: Where it computes.
        lead: Rows that it keeps of a sequence, less its committed tokens without the root; see `kernels.round_plan`.
    """

    vocabulary: DraftVocabulary
    device: torch.device
    lead: int

    def passes(
        self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool
    ) -> list[RoundPass]:
        """Return a pass for each of `widths` rows in turn, at ``positions [sum(widths)] int32``."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary.size]`` for ``states [rows, hidden]``."""
        ...


@dataclass(frozen=True, slots=True)
class _HeadPass:
    """`RoundPass` of a recurrent head."""

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
    """`RoundPass` of a decoder at ``positions [rows] int32``."""

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


class HeadRounds:
    """`RoundModel` of a recurrent head."""

    lead = 0

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        self.vocabulary = head.vocabulary
        self.device = head.device

    def passes(
        self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool
    ) -> list[RoundPass]:
        """See `RoundModel.passes`; the angles of all rows are computed at once."""
        cos, sin = (part.split_with_sizes(list(widths)) for part in self._head.rotation(positions))
        return [
            _HeadPass(self._head, Rotation(*angles), attention, pool) for angles in zip(cos, sin, strict=True)
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `RoundModel.logits`."""
        return self._head.logits(states)


class DecoderRounds:
    """`RoundModel` of a decoder, whose rows are tokens: it takes no features, and its states are for the logits alone.

    Args:
        decoder: The draft model.
        vocabulary: What `logits` range over.
        logits: Its output head, cut to the vocabulary.
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
        """See `RoundModel.passes`."""
        return [
            _DecoderPass(self._decoder, rows, attention, pool)
            for rows in positions.split_with_sizes(list(widths))
        ]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `RoundModel.logits`."""
        return self._logits(states)
