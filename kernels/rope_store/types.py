"""The data of rope_store."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels._launch import expect, expect_contiguous


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is added to each row of a product: an entry of a table, such as the share of an input that takes few values.

    Attributes:
        table: ``[entries, out]`` of any float dtype, the last dimension dense.
        index: ``[rows] int32``, contiguous, which entry each row takes.
    """

    table: torch.Tensor
    index: torch.Tensor

    def check(self, rows: int, out: int) -> None:
        """Raise a ValueError that names what does not fit a product ``[rows, out]``."""
        expect("table", self.table, (None, out))
        expect("index", self.index, (rows,), torch.int32)
        expect_contiguous("index", self.index)
        if self.table.stride(1) != 1:
            raise ValueError(
                f"the last dimension of table must be dense, its strides are {self.table.stride()}"
            )

    def rows(self) -> torch.Tensor:
        """Return the entries, ``[rows, out] fp32``."""
        return self.table.index_select(0, self.index).float()
