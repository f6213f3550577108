"""What weights take once they are loaded, told from the headers of their files."""

from __future__ import annotations

from math import prod

import torch

from outrider.shared.nn.checkpoint.tensor_file import TensorInfo

PACKED_ENDING = "_blocks"
GIB = 1 << 30


def loaded_bytes(name: str, info: TensorInfo, dtype: torch.dtype) -> int:
    """Return the bytes that a stored tensor takes once it is loaded; MXFP4 (two values per byte, and scales) is widened.

    Args:
        name: Of the tensor.
        info: What its file's header says.
        dtype: Of the model's weights.
    """
    if info.dtype is torch.uint8:
        return 2 * prod(info.shape) * dtype.itemsize if name.endswith(PACKED_ENDING) else 0
    return prod(info.shape) * dtype.itemsize if info.dtype.is_floating_point else info.nbytes


def gib(nbytes: int) -> str:
    """Return a size for a message."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB // 10 else f"{nbytes / (1 << 20):.1f} MiB"
