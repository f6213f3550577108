"""Tensor maps for the tensor memory accelerator (TMA), and the conditions that a mapped tensor must meet."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels._launch import ceil_div

_ALIGNMENT = 16
"""Required alignment of a map's address and strides, in bytes."""


def can_map(*tensors: torch.Tensor) -> bool:
    """Return whether TMA can map these tensors.

    Columns must be dense, and addresses and strides must be multiples of 16 bytes.
    """
    return all(
        tensor.stride(-1) == 1
        and all(n * tensor.element_size() % _ALIGNMENT == 0 for n in tensor.stride()[:-1])
        and tensor.data_ptr() % _ALIGNMENT == 0
        for tensor in tensors
    )


def tiles_of(tensor: torch.Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """Return a tensor's map. The tensor is ``[rows, columns]``, or ``[2, rows, columns]`` for pairs.

    Reads outside the tensor return zeros.
    """
    if tensor.dim() == 3:
        return TensorDescriptor.from_tensor(tensor, [2, block_rows, block_columns])
    # On a CPU, map only the tensor's own rows, because Triton's interpreter warns about overflows in
    # additional rows.
    rows = readable_rows(tensor, block_rows) if tensor.is_cuda else tensor.shape[0]
    return TensorDescriptor(
        tensor, [rows, tensor.shape[1]], list(tensor.stride()), [block_rows, block_columns]
    )


def readable_rows(tensor: torch.Tensor, block_rows: int) -> int:
    """Return the number of rows of a matrix ``[rows, columns]`` that whole tiles may read.

    The number can exceed the matrix's rows if the storage continues after the last row. Tiles that include
    the additional rows are faster: the tensor memory accelerator takes longer for a tile that reaches outside
    its tensor map. The additional rows only affect rows of the product that are never stored.
    """
    rows, columns = tensor.shape
    behind = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    held = (behind - columns) // tensor.stride(0) + 1
    return min(ceil_div(rows, block_rows) * block_rows, max(held, rows))
