"""The linear layer: a matrix product plus a bias. On CPUs, oneDNN packs large weights."""

from __future__ import annotations

import torch
from torch.nn import functional

# Row count for which oneDNN lays out a weight. Layouts for 4 to 512 rows are equally fast. The layout for 1
# row is slow.
_PACK_ROWS = 16
# Smallest number of elements of a packed weight. A call of oneDNN's operator takes 10 µs or more. With a
# smaller weight and one row, torch's own product took 2 to 4 µs.
_PACK_ELEMENTS = 256 * 256


class Linear:
    """Linear layer, ``x @ weight.T + bias``.

    In fp32 on a CPU, a large weight is packed, i.e. stored in oneDNN's blocked layout instead of row by row.
    With 12 layers of hidden size 256 and two threads, packed products were 2.1 times as fast for one row, and
    2.5 times as fast for 16 rows. With packed weights, 16 rows took only 1.9 times as long as one row.

    Args:
        weight: ``[out, in]``. If the layer packs the weight, it keeps no reference to this tensor.
        bias: ``[out]`` or None.
    """

    __slots__ = ("_packed_linear", "_weight", "bias", "in_features", "nbytes", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        self.bias = bias
        # Keep a reference to the operator's overload. Looking it up by name on every call would take as long
        # as a small operation.
        self._packed_linear = torch.ops.mkldnn._linear_pointwise.default if can_pack(weight) else None
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS) if self._packed_linear else weight
        )

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``[out, in]``, for kernels that read it. Raises an error if the weight is packed."""
        assert self._packed_linear is None, "a weight in oneDNN's layout has no rows"
        return self._weight

    @property
    def packed(self) -> bool:
        """True if the weight is in oneDNN's blocked layout."""
        return self._packed_linear is not None

    @property
    def rounded(self) -> bool:
        """True if the weight is in FP8."""
        return False

    @property
    def scales(self) -> torch.Tensor | None:
        """``[out] fp32``, the factors by which the rows of the weight are multiplied, or None."""
        return None

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T``, ``[rows, out]``, without the bias. The weight must not be packed."""
        return functional.linear(x, self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, out]`` for ``x [rows, in]``."""
        if self._packed_linear is not None:
            packed: torch.Tensor = self._packed_linear(x, self._weight, self.bias, "none", [], "")
            return packed
        return functional.linear(x, self._weight, self.bias)

    def plus(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``residual + self(x)``, ``[rows, out]``, as a new tensor."""
        if self._packed_linear is not None:
            return self(x).add_(residual)
        out = torch.addmm(residual, x, self._weight.t())
        return out if self.bias is None else out.add_(self.bias)


def can_pack(weight: torch.Tensor) -> bool:
    """True if oneDNN should pack this weight: it is fp32 on a CPU and large, and torch includes oneDNN."""
    return (
        weight.numel() >= _PACK_ELEMENTS
        and weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
