"""Chooses the GPU of a thread."""

from __future__ import annotations

import torch


def use_device(device: torch.device) -> None:
    """Make `device` current in this thread, because CUDA graphs and streams use the current device."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
