"""The residual stream that the kernels of a decoder layer pass to each other, prepared for the next norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEW_ROWS = 64
"""Largest number of rows for which the time of a matrix product is the time to read the weight matrix.

Up to this number, `skinny_gemm`'s own kernels compute products of every shape. Each row's norm is then spread
over several programs, and the kernel that reads the residual stream applies the norm's division. Beyond this
number, one program per row fills the GPU, and each program norms its row."""

MANY_ROWS = 512
"""Largest number of rows for which products use the method that measured fastest."""


def normed_on_write(rows: int, dtype: torch.dtype) -> bool:
    """Return whether rows of a residual stream are divided by their root mean square when they are written.

    This is the case for streams of more than `FEW_ROWS` rows. It is also the case for all fp16 streams,
    because values before the division can exceed the range of fp16. For example, the product of a residual of
    1000 and a norm weight of 100 exceeds 65504.

    Example:
        >>> import torch
        >>> from outrider.kernels.stream import normed_on_write
        >>> [normed_on_write(rows, torch.bfloat16) for rows in (64, 65)], normed_on_write(1, torch.float16)
        ([False, True], True)
    """
    return rows > FEW_ROWS or dtype is torch.float16


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """Rows of a residual stream, with the next RMS norm computed except for its final division.

    The norm of a row is ``scaled * rsqrt(sum(sums) / width + eps)``. The division by the root mean square can
    follow the matrix product. The product can therefore begin before any kernel has seen a whole row.

    Attributes:
        residual: ``[rows, width]``; rows may be strided.
        scaled: ``[rows, width]``, the residual times the norm's weight; already divided if `sums` is None.
        sums: ``[parts, rows] fp32``, partial sums of each row's squares. None if `scaled` is already divided.
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
