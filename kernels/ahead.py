"""What a kernel asks for on behalf of the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BYTES = 8 << 20
_LINE = 128


@dataclass(frozen=True, slots=True)
class Prefetch:
    """The weights that the next matrix product reads, a chunk of every row: asked for while this kernel leaves memory idle.

    Attributes:
        weight: ``[out, in]``, contiguous.
        begin: First byte of each row, a multiple of 16.
        size: Bytes of each row, likewise; 0: nothing.
    """

    weight: torch.Tensor
    begin: int
    size: int

    @classmethod
    def of(cls, weight: torch.Tensor, total: int = _BYTES, skip: int = 0) -> Prefetch:
        """Spread `total` bytes over the rows of a weight, behind the first `skip` bytes spread likewise."""
        rows, row_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
        begin = min(row_bytes, skip // rows // _LINE * _LINE)
        size = min(row_bytes - begin, total // rows // _LINE * _LINE)
        return cls(weight, begin, size)

    def then(self) -> Prefetch:
        """Return the same for the bytes behind these, as many at most."""
        row_bytes = self.weight.shape[1] * self.weight.element_size()
        begin = self.begin + self.size
        return Prefetch(self.weight, begin, min(row_bytes - begin, self.size) // _LINE * _LINE)
