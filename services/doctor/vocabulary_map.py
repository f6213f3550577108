"""Infers from the values of a ``d2t`` tensor whether the tensor stores offsets or target ids.

``d2t`` is a tensor of a draft head. It maps the token ids of the draft to token ids of the target. Published
heads store offsets: the target id minus the draft id.

Offsets repeat: if the draft vocabulary contains two neighbouring tokens of the target, both have the same
offset. Target ids never repeat.
"""

from __future__ import annotations

from enum import Enum

import torch


class D2tMeaning(Enum):
    """Possible meanings of the numbers in a ``d2t`` tensor."""

    OFFSETS = "offsets (target id - draft id)"
    TARGET_IDS = "target ids"
    EITHER = "offsets or target ids"
    NEITHER = "neither offsets nor target ids"


def d2t_meaning(d2t: torch.Tensor, t2d: torch.Tensor | None, target_size: int) -> D2tMeaning:
    """Return whether a ``d2t`` tensor stores offsets or target ids.

    The decision depends on the range of the values, on repeated values, and on the mask ``t2d`` if there is
    one.

    Args:
        d2t: ``[size]`` integers, one for each token of the draft vocabulary.
        t2d: ``[target_size]`` mask of the target tokens in the draft vocabulary, or None.
        target_size: Vocabulary size of the target.
    """
    values = d2t.to(torch.int64)
    as_offsets = is_vocabulary(values + torch.arange(values.shape[0]), t2d, target_size)
    as_ids = is_vocabulary(values, t2d, target_size)
    if as_offsets and as_ids:
        # For example, 0, 1, 2, … could be the ids of the first tokens, but also valid offsets.
        return D2tMeaning.EITHER
    if as_offsets:
        return D2tMeaning.OFFSETS
    return D2tMeaning.TARGET_IDS if as_ids else D2tMeaning.NEITHER


def is_vocabulary(ids: torch.Tensor, t2d: torch.Tensor | None, target_size: int) -> bool:
    """Return True if ``ids [size] int64`` are distinct target ids, and match ``t2d`` if it is given."""
    if not ids.numel():
        return False
    if int(ids.min()) < 0 or int(ids.max()) >= target_size or len(set(ids.tolist())) != ids.numel():
        return False
    if t2d is None or t2d.shape[0] != target_size:
        return True
    mask = t2d.to(torch.bool)
    return int(mask.sum()) == ids.numel() and bool(mask[ids].all())
