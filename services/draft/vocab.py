"""The draft vocabulary: maps the rows of a head's lm_head to target ids, with ``d2t`` or a token map."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.shared.base.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The part of the target's vocabulary that a draft head can draft.

    Attributes:
        size: Number of rows of the head's lm_head.
        target_size: Size of the target's vocabulary.
        d2t: ``[size] int64`` **offsets**: target id = draft id + d2t[draft id]. None if draft ids are target
            ids.
    """

    size: int
    target_size: int
    d2t: torch.Tensor | None

    @classmethod
    def identity(cls, size: int) -> DraftVocabulary:
        """Return the vocabulary of a head that can draft every token."""
        return cls(size, size, None)

    @classmethod
    def from_tensors(cls, d2t: torch.Tensor, t2d: torch.Tensor | None, target_size: int) -> DraftVocabulary:
        """Check the tensors d2t and t2d of a head's checkpoint, and return the vocabulary that they define.

        Args:
            d2t: ``[size]`` offsets of any integer type: target id = draft id + d2t[draft id].
            t2d: ``[target_size] bool``, True for each target id that the head can draft, or None. `t2d` only
                serves to check `d2t`.
            target_size: Size of the target's vocabulary.

        Raises:
            CheckpointError: Ids are repeated or out of range, or `t2d` marks other ids than `d2t`. A typical
                cause is a `d2t` that contains target ids instead of offsets.
        """
        offsets = d2t.to(torch.int64)
        ids = offsets + torch.arange(offsets.shape[0], device=offsets.device)
        if int(ids.min()) < 0 or int(ids.max()) >= target_size:
            raise CheckpointError(
                f"d2t maps draft ids to {int(ids.min())}…{int(ids.max())}, outside the vocabulary of "
                f"{target_size}. It must contain offsets (target id - draft id), not target ids.",
                field="d2t",
            )
        if len(set(ids.tolist())) != ids.shape[0]:
            raise CheckpointError(
                "d2t maps two draft ids to the same target id. It must contain offsets (target id - draft "
                "id).",
                field="d2t",
            )
        if t2d is not None and (int(t2d.sum()) != ids.shape[0] or not bool(t2d[ids].all())):
            raise CheckpointError(
                "t2d marks other tokens than d2t. Export both from the same vocabulary.", field="t2d"
            )
        return cls(ids.shape[0], target_size, offsets)

    @classmethod
    def from_token_map(cls, token_ids: torch.Tensor | None, target_size: int) -> DraftVocabulary:
        """Return the vocabulary of a head whose lm_head is cut to the ids of a token map (FR-Spec).

        Args:
            token_ids: ``[size] int64`` target ids, from `heads.files.token_map.read_token_map`. With None,
                the head can draft all ids.
            target_size: Size of the target's vocabulary.

        Raises:
            CheckpointError: An id is outside the vocabulary.
        """
        if token_ids is None:
            return cls.identity(target_size)
        ids = token_ids.sort().values
        if int(ids[-1]) >= target_size:
            raise CheckpointError(
                f"The token map contains the id {int(ids[-1])}, but the head's vocabulary has "
                f"{target_size} ids. Give the map that was made for this model's tokenizer.",
                field="speculative_token_map",
            )
        return cls(ids.shape[0], target_size, ids - torch.arange(ids.shape[0], device=ids.device))

    @classmethod
    def in_order(cls, token_ids: torch.Tensor, target_size: int) -> DraftVocabulary:
        """Return the vocabulary of a head whose lm_head has one row per id, in the order of `token_ids`.

        Args:
            token_ids: ``[size] int64``, distinct target ids.
            target_size: Size of the target's vocabulary.
        """
        return cls(
            token_ids.shape[0],
            target_size,
            token_ids - torch.arange(token_ids.shape[0], device=token_ids.device),
        )

    def target_ids(self, device: torch.device) -> torch.Tensor:
        """Return the target ids of all draft ids, ``[size] int64``."""
        ids = torch.arange(self.size, device=device)
        return ids if self.d2t is None else ids + self.d2t.to(device)
