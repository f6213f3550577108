"""FP8 as K and V are stored in: e4m3 without infinities, conversions that saturate."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of e4m3."""


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in another dtype; what e4m3 cannot hold becomes its largest number of that sign, not a NaN."""
    return tensor.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype is FP8 else tensor.to(dtype)


def movable(plane: torch.Tensor) -> torch.Tensor:
    """Return a plane as torch can move its elements by index: FP8 as bytes."""
    return plane.view(torch.uint8) if plane.dtype is FP8 else plane
