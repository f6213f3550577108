"""The residual stream that the kernels of a decoder layer pass to each other, prepared for the next norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEW_ROWS = 64
"""Largest number of rows for which a product is bound by reading the matrix.

`skinny_gemm`'s own kernels compute such products for every shape. Up to this number, each row's norm is
spread over several programs, and the kernel that reads the stream applies the norm's division. Beyond it, one
program per row fills the GPU, and each program norms its row."""

MANY_ROWS = 512
"""Largest number of rows for which products use the method that measured fastest."""


def normed_on_write(rows: int, dtype: torch.dtype) -> bool:
    """Return whether rows of a stream are divided by their root mean square when they are written.

    This is the case for streams of more than `FEW_ROWS` rows, and for all fp16 streams, because values can
    exceed the range of fp16 before the division. For example, the product of a residual of 1000 and a norm
    weight of 100 exceeds 65504.

    Example:
        >>> import torch
        >>> from outrider.kernels.stream import normed_on_write
        >>> [normed_on_write(rows, torch.bfloat16) for rows in (64, 65)], normed_on_write(1, torch.float16)
        ([False, True], True)
    """
    return rows > FEW_ROWS or dtype is torch.float16


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows of a residual stream, with the next norm computed except for the division by the root mean square.

    The norm of a row is ``scaled * rsqrt(sum(sums) / width + eps)``. The division can follow the matrix
    product, so no kernel has to see a whole row before the product begins.

    Attributes:
        residual: ``[rows, width]``; rows may be strided.
        scaled: ``[rows, width]``, the residual times the norm's weight; already divided if `sums` is None.
        sums: ``[parts, rows] fp32``, each row's sum of squares in parts, or None.
        eps: Epsilon of the norm, added to the mean square.
    """

    residual: torch.Tensor
    scaled: torch.Tensor
    sums: torch.Tensor | None
    eps: float

    def inverse_rms(self) -> torch.Tensor | None:
        """Return the factor that is still to be applied, ``[rows, 1] fp32``, or None."""
        if self.sums is None:
            return None
        return torch.rsqrt(self.sums.sum(0) / self.scaled.shape[1] + self.eps)[:, None]
