"""The embedding and the lm_head of a head: its own, or borrowed from the target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from outrider.services.draft.heads.files.head_config import HeadConfig
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.layers.blocks import Linear

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class TokenTables:
    """Tokens to vectors and states to logits.

    Args:
        config: The head's.
        reader: Its file, for device, dtype and the errors.
        vocabulary: What the logits range over; of a full lm_head only its rows are kept.
        embedding: ``[vocab_size, hidden_size]``, or None to borrow the target's.
        lm_head: ``[vocabulary.size or vocab_size, hidden_size]``, or None to borrow the target's.
        target_hidden_size: Width of what can be borrowed.

    Raises:
        CheckpointError: something has to be borrowed and the target's does not fit.
    """

    def __init__(
        self,
        config: HeadConfig,
        reader: CheckpointReader,
        vocabulary: DraftVocabulary,
        embedding: torch.Tensor | None,
        lm_head: torch.Tensor | None,
        target_hidden_size: int,
    ) -> None:
        self._device = reader.device
        self._dtype = reader.dtype or torch.float32
        self._vocabulary = vocabulary
        self._embedding = embedding
        self._lm_head: Linear | None = None
        if lm_head is not None:
            self._lm_head = (
                Linear(lm_head) if lm_head.shape[0] == vocabulary.size else self._gathered(lm_head)
            )
        elif config.tie_word_embeddings and embedding is not None:
            self._lm_head = self._gathered(embedding)
        shape = (config.vocab_size, target_hidden_size)
        parts = {EMBEDDING: self._embedding, LM_HEAD: self._lm_head}
        self._missing = {name: shape for name, part in parts.items() if part is None}
        if self._missing and target_hidden_size != config.hidden_size:
            name = next(iter(self._missing))
            raise CheckpointError(
                f"{reader.path}: the head has no {name} of its own and cannot borrow the target's: its hidden_size is "
                f"{config.hidden_size}, target_hidden_size {target_hidden_size}. Export the head with {name}.",
                field=name,
            )

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """See `DraftStrategy.missing`."""
        return dict(self._missing)

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """See `DraftStrategy.lend`."""
        shape = self._missing.get(name)
        if shape is None:
            raise CheckpointError(
                f"{name} is not wanted; missing: {', '.join(self._missing) or 'nothing'}.", field=name
            )
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} is {list(tensor.shape)}, must be {list(shape)}.", field=name)
        tensor = tensor.to(device=self._device, dtype=self._dtype)
        if name == EMBEDDING:
            self._embedding = tensor
        else:
            self._lm_head = self._gathered(tensor)
        del self._missing[name]

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding, ``[vocab_size, hidden_size]``; nothing of it is missing any more."""
        assert self._embedding is not None, "the embedding is missing; lend() it first"
        return self._embedding

    @property
    def lm_head(self) -> Linear:
        """What makes logits of states; nothing of it is missing any more."""
        assert self._lm_head is not None, "lm_head is missing; lend() it first"
        return self._lm_head

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, hidden_size]`` for ``tokens [rows]``."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary.size]`` for ``states [rows, hidden_size]``."""
        return self.lm_head(states)

    def _gathered(self, full: torch.Tensor) -> Linear:
        """Keep the vocabulary's rows of ``[vocab_size, hidden_size]``."""
        return Linear(
            full if self._vocabulary.d2t is None else full[self._vocabulary.target_ids(full.device)]
        )
