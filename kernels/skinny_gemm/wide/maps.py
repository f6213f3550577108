"""What the tensor memory accelerator reads, and what it can read."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels._launch import ceil_div

_ALIGNMENT = 16
"""Bytes, of a map's address and strides."""


def can_map(*tensors: torch.Tensor) -> bool:
    """Whether maps can express these: addresses and strides of whole 16 bytes, columns that are neighbours."""
    return all(
        tensor.stride(-1) == 1
        and all(n * tensor.element_size() % _ALIGNMENT == 0 for n in tensor.stride()[:-1])
        and tensor.data_ptr() % _ALIGNMENT == 0
        for tensor in tensors
    )


def tiles_of(tensor: torch.Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Return the map of a tensor ``[rows, columns]``, or of pairs ``[2, rows, columns]``, in tiles; outside are zeros."""
    if tensor.dim() == 3:
        return TensorDescriptor.from_tensor(tensor, [2, block_rows, block_columns])
    rows = (
        readable_rows(tensor, block_rows) if tensor.is_cuda else tensor.shape[0]
    )  # the interpreter warns of what garbage overflows
    return TensorDescriptor(
        tensor, [rows, tensor.shape[1]], list(tensor.stride()), [block_rows, block_columns]
    )


def readable_rows(tensor: torch.Tensor, block_rows: int) -> int:
    """Return up to which row whole tiles of ``[rows, columns]`` are read: into memory of the tensor's own behind its last row.

    A tile that reaches outside of its map takes the accelerator longer than one that does not (measured: a product with 96 rows took
    longer than one with 128). What is read there ends up in rows of the product that nobody stores.
    """
    rows, columns = tensor.shape
    behind = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    held = (behind - columns) // tensor.stride(0) + 1
    return min(ceil_div(rows, block_rows) * block_rows, max(held, rows))
