"""Whether a ``d2t`` holds offsets, as published heads do, or target ids: told from the values.

Offsets grow slowly and repeat (neighbouring tokens that are both kept share one); target ids never repeat.
"""

from __future__ import annotations

from enum import Enum

import torch


class D2tMeaning(Enum):
    """What the numbers of a ``d2t`` can mean."""

    OFFSETS = "offsets (target id - draft id)"
    TARGET_IDS = "target ids"
    EITHER = "offsets or target ids"
    NEITHER = "neither offsets nor target ids"


def d2t_meaning(d2t: torch.Tensor, t2d: torch.Tensor | None, target_size: int) -> D2tMeaning:
    """Decide by range, by distinctness and, where there is one, by the membership mask.

    Args:
        d2t: ``[size]`` integers.
        t2d: ``[target_size]`` mask of the kept tokens, or None.
        target_size: The target's vocabulary.
    """
    values = d2t.to(torch.int64)
    as_offsets = is_vocabulary(values + torch.arange(values.shape[0]), t2d, target_size)
    as_ids = is_vocabulary(values, t2d, target_size)
    if as_offsets and as_ids:
        # All zeros are offsets of the identity; a map that keeps the first tokens only cannot tell.
        return D2tMeaning.EITHER
    if as_offsets:
        return D2tMeaning.OFFSETS
    return D2tMeaning.TARGET_IDS if as_ids else D2tMeaning.NEITHER


def is_vocabulary(ids: torch.Tensor, t2d: torch.Tensor | None, target_size: int) -> bool:
    """Return whether ``ids [size] int64`` are distinct target ids, and those that ``t2d`` marks if it is there."""
    if not ids.numel():
        return False
    if int(ids.min()) < 0 or int(ids.max()) >= target_size or len(set(ids.tolist())) != ids.numel():
        return False
    if t2d is None or t2d.shape[0] != target_size:
        return True
    mask = t2d.to(torch.bool)
    return int(mask.sum()) == ids.numel() and bool(mask[ids].all())
