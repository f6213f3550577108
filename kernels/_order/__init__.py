"""Deterministic top-k, in the order that all kernels use: value descending, then index ascending.

torch.topk does not define the order of ties. These functions define it, because a node of a draft tree must
never rank before a parent with the same score.
"""

from __future__ import annotations

import numpy as np
import torch

_FEW = 8  # up to this k, repeated argmax beats a top-k of int64 keys on a CPU


def rank_keys(values: torch.Tensor) -> torch.Tensor:
    """Return int64 keys whose descending order is (value descending, index ascending).

    The keys within a row are distinct.

    Args:
        values: ``[rows, n] fp32``. -0 and +0 are equal; a NaN ranks by its bit pattern (a positive NaN
            first).

    Returns:
        ``[rows, n] int64``. The upper half of a key orders by value. The lower half is the complement of the
        index.
    """
    bits = (values + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative values: flip, so that integers order like floats
    n = values.shape[-1]
    return torch.add(torch.arange(n - 1, -1, -1, device=values.device), ordered.long(), alpha=1 << 32)


def ranked_topk(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best k of every row, ordered by (value descending, index ascending).

    Args:
        values: ``[rows, n] fp32``, n >= k.
        k: Number of values to return per row.

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
    """Return the indices of the k best values of each row, by searching for the first maximum k times.

    The result is ``[rows, k] int64``. It is None if a selected value of any row is NaN or infinite, as in
    rows with fewer than k values above -inf. This is the fastest method for a small k.
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
    """Return the indices of the k best values of each row, in the order of `ranked_topk`.

    The sort runs on the host, with numpy. For rows of a few hundred values on a CPU, numpy takes a third of
    torch's time.

    Args:
        values: ``[rows, n] fp32`` on any device, n >= k. NaN ranks last.
        k: Number of indices to return per row.

    Returns:
        ``[rows, k] int64`` as a numpy array.
    """
    return np.argsort(-values.detach().cpu().numpy(), axis=-1, kind="stable")[:, :k]
