"""Copies numbers from the host to the device without waiting for the copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | np.ndarray,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return a tensor with these values on the device.

    The copy is enqueued on the current stream, so the host does not wait.
    """
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda" or not host.numel():
        return host.to(device)
    # The host does not wait for a copy from pinned memory. torch keeps that memory until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)
