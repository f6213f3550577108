"""The one order of candidates: value descending, index ascending.

torch.topk leaves ties open, and a tie must not part a child from its parent.
"""

from __future__ import annotations

import numpy as np
import torch

_FEW = 8


def rank_keys(values: torch.Tensor) -> torch.Tensor:
    """Return int64 keys whose descending order is (value descending, index ascending), all different within a row.

    Args:
        values: ``[rows, n] fp32``. -0 and +0 count as equal; a NaN ranks by its bit pattern (a positive one first).

    Returns:
        ``[rows, n] int64``: the value's order-preserving bits above, the complement of the index below.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    n = values.shape[-1]
    return torch.add(torch.arange(n - 1, -1, -1, device=values.device), ordered.long(), alpha=1 << 32)


def ranked_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best k of every row, ordered by (value descending, index ascending).

    Args:
        values: ``[rows, n] fp32``, n >= k.
        k: How many.

    Returns:
        values ``[rows, k] fp32`` and indices ``[rows, k] int64``.
    """
    n = values.shape[-1]
    if k <= _FEW and values.device.type == "cpu":
        picked = _repeated_argmax(values, k)
        if picked is not None:
            indices = torch.from_numpy(picked)
            return values.gather(-1, indices), indices
    keys = rank_keys(values).topk(k, dim=-1, sorted=True).values
    indices = (n - 1) - (keys & 0xFFFFFFFF)
    return values.gather(-1, indices), indices


def _repeated_argmax(values: torch.Tensor, k: int) -> np.ndarray | None:
    """Return the indices of the best k, ``[rows, k] int64``, by taking the first maximum k times: the quickest way for a few of many.

    None where a row has a NaN among them, or fewer than k values above -inf.
    """
    left = values.detach().numpy().copy()
    rows = np.arange(left.shape[0])
    picked = np.empty((left.shape[0], k), dtype=np.int64)
    for rank in range(k):
        best = left.argmax(axis=1)
        if not np.isfinite(left[rows, best]).all():
            return None
        picked[:, rank] = best
        left[rows, best] = -np.inf
    return picked


def ranked_indices(values: torch.Tensor, k: int) -> np.ndarray:
    """Return the indices of the best k of every row in the same order, computed on the host; for rows of some hundred candidates.

    Args:
        values: ``[rows, n] fp32`` on any device, n >= k. NaN ranks last.
        k: How many.

    Returns:
        ``[rows, k] int64``, a numpy array: on a CPU its operations cost a third of torch's, and such rows are all overhead.
    """
    return np.argsort(-values.detach().cpu().numpy(), axis=-1, kind="stable")[:, :k]
