"""Numbers of the host for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a tensor of these values on the device, in stream order: a GPU that is still at work is not waited for."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda" or not host.numel():
        return host.to(device)
    # Pinned memory is copied while the host goes on; torch keeps it until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)
