"""The residual stream between the kernels of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FEW_ROWS = 64
"""Up to so many rows a product is bound by reading the matrix, and kernels of our own compute it whatever its shape; norms are then spread
over the GPU and left to the reader. More rows fill it with a program each, and are normed."""

MANY_ROWS = 512
"""Up to so many rows products are computed by whatever was measured to be faster."""


def normed_at_once(rows: int, dtype: torch.dtype) -> bool:
    """Whether rows of a stream are divided by their root mean square as they are made: many rows, and all in fp16, whose range they leave.

    A residual of a thousand times a norm's weight of a hundred is nothing unusual before the division.
    """
    return rows > FEW_ROWS or dtype is torch.float16


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows of a residual stream, with what the norm that reads them next needs short of the division by their root mean square.

    The norm of a row is ``scaled * rsqrt(sum of its sums / width + eps)``. The division commutes with the matrix product that follows, so
    whatever reads the product does it, and no kernel has to see a whole row before the product begins.

    Attributes:
        residual: ``[rows, width]``; rows may be strided.
        scaled: ``[rows, width]``, the residual times the norm's weight; already divided where `sums` is None.
        sums: ``[parts, rows] fp32``, each row's sum of squares in parts, or None.
        eps: Of the norm.
    """

    residual: torch.Tensor
    scaled: torch.Tensor
    sums: torch.Tensor | None
    eps: float

    def inverse_rms(self) -> torch.Tensor | None:
        """Return ``[rows, 1] fp32``, the factor that is still to be applied, or None."""
        if self.sums is None:
            return None
        return torch.rsqrt(self.sums.sum(0) / self.scaled.shape[1] + self.eps)[:, None]
