"""Table lookup that rope_store adds to the rows of a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.kernels._launch import expect, expect_contiguous


@dataclass(frozen=True, slots=True)
class Lookup:
    """Entries of a table, to be added to the rows of a matrix product.

    The table can contain, for example, precomputed products of an input with few possible values.

    Attributes:
        table: ``[entries, out]`` of any float dtype, the last dimension dense.
        index: ``[rows] int32``, contiguous: the entry of each row.
    """

    table: torch.Tensor
    index: torch.Tensor

    def check(self, rows: int, out: int) -> None:
        """Check that the entries fit a product ``[rows, out]``.

        Raises:
            ValueError: A tensor's shape, dtype or layout is wrong. The message names the tensor.
        """
        expect("table", self.table, (None, out))
        expect("index", self.index, (rows,), torch.int32)
        expect_contiguous("index", self.index)
        if self.table.stride(1) != 1:
            raise ValueError(
                f"the last dimension of table must be dense; its strides are {self.table.stride()}"
            )

    def rows(self) -> torch.Tensor:
        """Return the entries, ``[rows, out] fp32``."""
        return self.table.index_select(0, self.index).float()
