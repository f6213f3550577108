"""Base class of heads that are loaded from a folder. It has their sizes, rotary table and token tables.

A head may lack tensors that it borrows from its target.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.services.draft.growth.recurrent_head import RecurrentHead
from outrider.services.draft.heads.files.head_config import HeadConfig
from outrider.services.draft.heads.tables import TokenTables
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.layers.rope import RotaryEmbedding, Rotation


class LoadedHead(RecurrentHead):
    """Base class of heads that are loaded from a checkpoint: sizes, rotary table and token tables.

    Subclasses add the head's network.

    Args:
        layer: Configuration of the head's decoder layers.
        reader: Reader of the head's checkpoint.
        vocabulary: The tokens that the logits range over.
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
        return self._tables.missing()

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        self._tables.lend(name, tensor)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        return self._rope(positions)
