"""What a drafting round on the device needs of a model: passes over rows whose numbers and places are known without the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from outrider.services.draft.heads.base import RecurrentHead
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.decoder import Decoder
from outrider.shared.nn.rope import Rotation

RoundPass = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(tokens ``[rows] int32``, features ``[m, width]``, which of them each row takes ``[rows] int32``) → states ``[rows, hidden]``.
Attention is planned before. The features of a level are the states of the level before."""


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

    def passes(self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool) -> list[RoundPass]:
        """Return a pass for each of `widths` rows in turn, at ``positions [sum(widths)] int32``."""
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary.size]`` for ``states [rows, hidden]``."""
        ...


class HeadRounds:
    """`RoundModel` of a recurrent head."""

    lead = 0

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        self.vocabulary = head.vocabulary
        self.device = head.device

    def passes(self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool) -> list[RoundPass]:
        """See `RoundModel.passes`; the angles of all rows are computed at once."""
        cos, sin = (part.split_with_sizes(list(widths)) for part in self._head.rotation(positions))
        head = self._head

        def run(rotation: Rotation, tokens: torch.Tensor, features: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
            return head.forward(tokens, features, rotation, attention, pool, source)

        return [partial(run, Rotation(*angles)) for angles in zip(cos, sin, strict=True)]

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

    def __init__(self, decoder: Decoder, vocabulary: DraftVocabulary, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._decoder = decoder
        self._logits = logits
        self.vocabulary = vocabulary
        self.device = decoder.device

    def passes(self, positions: torch.Tensor, widths: Sequence[int], attention: AttentionBackend, pool: KVPool) -> list[RoundPass]:
        """See `RoundModel.passes`."""

        def run(rows: torch.Tensor, tokens: torch.Tensor, _features: torch.Tensor, _source: torch.Tensor) -> torch.Tensor:
            return self._decoder.forward(tokens, rows, attention, pool).hidden

        return [partial(run, rows) for rows in positions.split_with_sizes(list(widths))]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """See `RoundModel.logits`."""
        return self._logits(states)
