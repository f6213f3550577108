"""What the heads that are read from a folder have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.services.draft.heads.files.head_config import HeadConfig
from outrider.services.draft.heads.tables import TokenTables
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.layers.rope import RotaryEmbedding, Rotation


class LoadedHead:
    """Sizes, rotary table and token tables of a head; the rest of `RecurrentHead` is its kind's.

    Args:
        layer: Of its decoder layers.
        reader: Of its checkpoint.
        vocabulary: What its logits range over.
    """

    _tables: TokenTables

    def __init__(self, layer: HeadConfig, reader: CheckpointReader, vocabulary: DraftVocabulary) -> None:
        self.device = reader.device
        self.dtype = reader.dtype or torch.float32
        self.hidden_size = layer.hidden_size
        self.num_layers = layer.num_layers
        self.kv_heads = layer.num_kv_heads
        self.head_dim = layer.head_dim
        self.latent = layer.latent is not None
        self.fingerprint = f"{layer.fingerprint[:32]}{reader.fingerprint[:32]}"
        self.vocabulary = vocabulary
        self._rope = RotaryEmbedding(layer.rope, layer.rotary_dim, self.device, self.dtype)

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """See `DraftStrategy.missing`."""
        return self._tables.missing()

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """See `DraftStrategy.lend`."""
        self._tables.lend(name, tensor)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """See `RecurrentHead.rotation`."""
        return self._rope(positions)
