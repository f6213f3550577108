"""The interface of recurrent draft heads (EAGLE family): forward pass, logits, borrowed tensors, features."""

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
    """Selects the rows for which a pass of a head returns states: the last row of each sequence, or no rows.

    For all other rows, the last layer computes only K and V.

    Attributes:
        batch: Attention inputs of the last rows, one row per sequence. None if no states are wanted.
        rows: ``[sequences] int64``, the indices of the last rows. None if every sequence has the same number
            of rows.
    """

    batch: AttentionBatch | None
    rows: torch.Tensor | None = None

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the last row of each sequence from ``rows [rows, ...]``, ``[sequences, ...]``, or no rows.

        The result is a view if possible.
        """
        if self.batch is None:
            return rows[:0]
        if self.rows is not None:
            return rows.index_select(0, self.rows)
        return rows.view(self.batch.page_table.shape[0], -1, *rows.shape[1:])[:, -1]


ONLY_KEYS = Ends(None)
"""Selects no rows: the pass computes only K and V, and no states."""


class RecurrentHead(Protocol):
    """A draft head. Its input row at position t consists of the token at t + 1 and the feature of t.

    The head's output state is its own input feature for the next step.

    Attributes:
        algorithm: Name of the algorithm, for example ``EAGLE3``.
        fingerprint: Fingerprint of the head's weights.
        hidden_size: Width of states and of feature rows.
        num_layers, kv_heads, head_dim: Sizes of the head's KV pool.
        latent: True if the KV pool has one latent plane per layer instead of K and V.
        vocabulary: The tokens that the logits range over.
        device, dtype: Device and dtype of the head.
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
        """Return the hidden states of the target that this head reads as features.

        If `target` is None, the result contains only the properties that do not depend on a target.

        Raises:
            CheckpointError: The head does not fit the target.
        """
        ...

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of the target's tensors that the head still needs to borrow."""
        ...

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Set one of the missing tensors."""
        ...

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the rotary angles of ``positions [rows]``. Any position is allowed."""
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
        """Run the head over rows, and write the K/V of these rows to the head's KV pool.

        Args:
            tokens: ``[rows] int32``, target token ids. The token of each row is one position after the row's
                feature.
            features: ``[n, hidden_size]``: projected features of the target, or states of this head.
            rotation: Rotary angles of the rows' positions.
            attention: Attention backend, already planned for these rows.
            pool: KV pool of the head.
            source: ``[rows] int32``, each row's index into `features`. With None, row i uses feature i.
            ends: The rows whose states are wanted. With None, the states of all rows are wanted.

        Returns:
            The states ``[rows, hidden_size]`` of the wanted rows. They are the input of `logits`, and the
            features of the next step.
        """
        ...

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[rows, vocabulary.size]`` for ``states [rows, hidden_size]``."""
        ...
