"""The draft vocabulary: which of the target's tokens a head can name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.shared.base.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A subset of the target's vocabulary, or all of it.

    Attributes:
        size: Rows of the head's lm_head.
        target_size: The target's vocabulary.
        d2t: ``[size] int64`` **offsets**: target id = draft id + d2t[draft id]; None when draft ids are target ids.
    """

    size: int
    target_size: int
    d2t: torch.Tensor | None

    @classmethod
    def identity(cls, size: int) -> DraftVocabulary:
        """Return the vocabulary of a head that names every token."""
        return cls(size, size, None)

    @classmethod
    def from_tensors(cls, d2t: torch.Tensor, t2d: torch.Tensor | None, target_size: int) -> DraftVocabulary:
        """Check the mapping of a checkpoint.

        Args:
            d2t: ``[size]`` offsets, any integer type.
            t2d: ``[target_size] bool`` membership, only compared; or None.
            target_size: The target's vocabulary.

        Raises:
            CheckpointError: ids out of range or repeated (absolute ids stored as offsets are), or t2d says otherwise.
        """
        offsets = d2t.to(torch.int64)
        ids = offsets + torch.arange(offsets.shape[0], device=offsets.device)
        if int(ids.min()) < 0 or int(ids.max()) >= target_size:
            raise CheckpointError(
                f"d2t maps draft ids to {int(ids.min())}…{int(ids.max())}, outside the vocabulary of {target_size}; it must hold offsets "
                "(target id - draft id), not target ids.",
                field="d2t",
            )
        if len(set(ids.tolist())) != ids.shape[0]:
            raise CheckpointError(
                "d2t maps two draft ids to one target id; it must hold offsets (target id - draft id).",
                field="d2t",
            )
        if t2d is not None and (int(t2d.sum()) != ids.shape[0] or not bool(t2d[ids].all())):
            raise CheckpointError(
                "t2d names other tokens than d2t; export both from the same vocabulary.", field="t2d"
            )
        return cls(ids.shape[0], target_size, offsets)

    @classmethod
    def from_token_map(cls, token_ids: torch.Tensor | None, target_size: int) -> DraftVocabulary:
        """Return the vocabulary of a head that drafts with the target's lm_head, cut to the rows of a token map (FR-Spec).

        Args:
            token_ids: ``[size] int64`` target ids, see `heads.token_map.read_token_map`; None = all of them.
            target_size: The target's vocabulary.

        Raises:
            CheckpointError: ids outside the vocabulary.
        """
        if token_ids is None:
            return cls.identity(target_size)
        ids = token_ids.sort().values
        if int(ids[-1]) >= target_size:
            raise CheckpointError(
                f"The token map names token {int(ids[-1])}, the head's vocabulary has {target_size}; give the map that was made for this "
                "model's tokenizer.",
                field="speculative_token_map",
            )
        return cls(ids.shape[0], target_size, ids - torch.arange(ids.shape[0], device=ids.device))

    @classmethod
    def in_order(cls, token_ids: torch.Tensor, target_size: int) -> DraftVocabulary:
        """Return the vocabulary of a head whose lm_head has a row for each of ``token_ids [size]``, distinct target ids, in that order."""
        return cls(
            token_ids.shape[0],
            target_size,
            token_ids - torch.arange(token_ids.shape[0], device=token_ids.device),
        )

    def target_ids(self, device: torch.device) -> torch.Tensor:
        """Return the target id of every draft id, ``[size] int64``."""
        ids = torch.arange(self.size, device=device)
        return ids if self.d2t is None else ids + self.d2t.to(device)
