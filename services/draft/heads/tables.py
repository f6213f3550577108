"""A head's embedding and lm_head: its own, or borrowed from the target (`TokenTables.lend`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from outrider.services.draft.heads.files.head_config import HeadConfig
from outrider.services.draft.vocab import DraftVocabulary
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.layers.modules import Linear

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


class TokenTables:
    """A head's embedding and lm_head: maps tokens to embeddings, and states to logits.

    Args:
        config: Configuration of the head's layers.
        reader: Reader of the head's checkpoint. Supplies the device, the dtype and the path for errors.
        vocabulary: The tokens that the logits range over. A full lm_head is cut to the rows of these tokens.
        embedding: ``[vocab_size, hidden_size]``, or None to borrow the target's embedding.
        lm_head: ``[vocabulary.size or vocab_size, hidden_size]``, or None to borrow the target's lm_head.
        target_hidden_size: Width of the target's embedding and lm_head.

    Raises:
        CheckpointError: A tensor must be borrowed, but the target's tensor has the wrong width.
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
                f"{reader.path}: the head has no {name}, and the target's does not fit: the head's "
                f"hidden_size is {config.hidden_size}, its target_hidden_size is {target_hidden_size}. "
                f"Export the head again, with {name}.",
                field=name,
            )

    def missing(self) -> Mapping[str, tuple[int, ...]]:
        """Return the names and shapes of the target's tensors that the head still needs to borrow."""
        return dict(self._missing)

    def lend(self, name: str, tensor: torch.Tensor) -> None:
        """Store a tensor borrowed from the target.

        Raises:
            CheckpointError: The tensor is not missing, or its shape is wrong.
        """
        shape = self._missing.get(name)
        if shape is None:
            raise CheckpointError(
                f"The head does not borrow {name}; still missing: {', '.join(self._missing) or 'nothing'}.",
                field=name,
            )
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"The target's {name} has shape {list(tensor.shape)}, but the head needs {list(shape)}. "
                "Serve the target that the head was trained for.",
                field=name,
            )
        tensor = tensor.to(device=self._device, dtype=self._dtype)
        if name == EMBEDDING:
            self._embedding = tensor
        else:
            self._lm_head = self._gathered(tensor)
        del self._missing[name]

    @property
    def embedding(self) -> torch.Tensor:
        """The embedding, ``[vocab_size, hidden_size]``. If the head has none, call `lend` first."""
        assert self._embedding is not None, "the embedding is missing; lend() it first"
        return self._embedding

    @property
    def lm_head(self) -> Linear:
        """The projection of states to logits. If the head has none, call `lend` first."""
        assert self._lm_head is not None, "lm_head is missing; lend() it first"
        return self._lm_head

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[rows, hidden_size]`` of ``tokens [rows]``."""
        return functional.embedding(tokens, self.embedding)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[rows, vocabulary.size]`` of ``states [rows, hidden_size]``."""
        return self.lm_head(states)

    def _gathered(self, full: torch.Tensor) -> Linear:
        """Make a projection from the vocabulary's rows of a full lm_head, ``[vocab_size, hidden_size]``."""
        return Linear(
            full if self._vocabulary.d2t is None else full[self._vocabulary.target_ids(full.device)]
        )
