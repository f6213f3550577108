"""Limits of a device for attention: its number of multiprocessors and the shared memory of a program."""

from __future__ import annotations

import functools

import torch

from outrider.kernels.tree_attention.plan import SHARED_BYTES


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device.

    Under Triton's interpreter, the number is small, so that the tests cover both split and unsplit batches.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def has_room(device: torch.device) -> bool:
    """Return whether a program may use `SHARED_BYTES` of shared memory."""
    if device.type != "cuda":
        return True
    # Read the attribute by name, because neither torch's type stubs nor ROCm have it.
    most = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return int(most) >= SHARED_BYTES
