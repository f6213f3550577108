"""FP8 storage of K and V: saturating conversion to e4m3, which has no infinities, and views for indexing."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite e4m3 value."""


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in another dtype. Conversion to e4m3 clamps to ±448 instead of producing NaN."""
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype is FP8 else tensor.to(dtype)


def movable(plane: torch.Tensor) -> torch.Tensor:
    """Return a view of a plane that torch can index. An FP8 plane is viewed as bytes, any other as it is."""
    return plane.view(torch.uint8) if plane.dtype is FP8 else plane
