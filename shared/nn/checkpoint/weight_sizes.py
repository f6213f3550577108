"""Computes from file headers how many bytes the weights take after loading, and formats sizes."""

from __future__ import annotations

from math import prod

import torch

from outrider.shared.nn.checkpoint.tensor_file import TensorInfo

PACKED_ENDING = "_blocks"
GIB = 1 << 30


def loaded_bytes(name: str, info: TensorInfo, dtype: torch.dtype) -> int:
    """Return the number of bytes that a tensor of a checkpoint occupies after loading.

    MXFP4 weights are converted to `dtype` during loading. Each stored byte becomes two weights. The scales
    occupy no memory, because they are multiplied into the weights.

    Args:
        name: The tensor's name.
        info: Shape and type from the header.
        dtype: Type of the model's weights.
    """
    if info.dtype is torch.uint8:
        return 2 * prod(info.shape) * dtype.itemsize if name.endswith(PACKED_ENDING) else 0
    return prod(info.shape) * dtype.itemsize if info.dtype.is_floating_point else info.nbytes


def gib(nbytes: int) -> str:
    """Format a size for a message, in GiB or MiB."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 else f"{nbytes / (1 << 20):.1f} MiB"
