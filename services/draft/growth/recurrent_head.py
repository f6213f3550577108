"""What the tree grower needs of a recurrent head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.services.draft.target_info import TargetInfo
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.attn.base import AttentionBackend, AttentionBatch
from outrider.shared.kv.pool import KVPool
from outrider.shared.nn.layers.rope import Rotation
from outrider.shared.spec.drafter import FeatureSpec


@dataclass(frozen=True, slots=True)
class Ends:
    """Which states are wanted of a pass over rows: those of the last row of each sequence, or none. Of the others K and V are computed.

    Attributes:
        batch: What those rows see, one a sequence; None: no state is wanted.
        rows: ``[sequences] int64``, which rows they are; None: the sequences have equally many.
    """

    batch: AttentionBatch | None
    rows: torch.Tensor | None = None

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return those of ``rows [rows, ...]``: ``[sequences, ...]``, or none of them; a view where that is possible."""
        if self.batch is None:
            return rows[:0]
        if self.rows is not None:
            return rows.index_select(0, self.rows)
        return rows.view(self.batch.page_table.shape[0], -1, *rows.shape[1:])[:, -1]


ONLY_KEYS = Ends(None)
"""No state is wanted, only K and V."""


class RecurrentHead(Protocol):
    """A head that predicts from pairs (token t + 1, feature of t) and feeds its own state back as the next feature.

    Attributes:
        algorithm: E.g. ``EAGLE3``.
        fingerprint: Of its weights.
        hidden_size: Width of states and of feature rows.
        num_layers, kv_heads, head_dim: What its KV pool holds.
        latent: The pool keeps one latent plane per layer instead of K and V.
        vocabulary: What its logits range over.
        device, dtype: Where and how it computes.
    """

    algorithm: str
    fingerprint: str
    hidden_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    latent: bool
    vocabulary: DraftVocabulary
    device: torch.device
    dtype: torch.dtype

    def feature_spec(self, target: TargetInfo | None) -> FeatureSpec:
        """See `DraftStrategy.feature_spec`."""
        ...

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """See `DraftStrategy.missing`."""
        ...

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """See `DraftStrategy.lend`."""
        ...

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the rotary angles of ``positions [rows]``; any position works."""
        ...

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
        """Run the head over rows; writes their K/V.

        Args:
            tokens: ``[rows] int32`` target ids, each one ahead of its feature.
            features: ``[rows, hidden_size]``: projected features of the target, or states of this head.
            rotation: Of the rows' positions.
            attention: Planned for these rows.
            pool: The head's KV.
            source: ``[rows] int32``, which of `features` each row takes, however many there are; None: each its own.
            ends: Which rows' states are wanted; None: those of all.

        Returns:
            States ``[rows, hidden_size]`` of the wanted rows: what `logits` reads and what serves as the next feature.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary.size]`` for ``states [rows, hidden_size]``."""
        ...
