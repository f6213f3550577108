"""Linear layers whose weights are stored in FP8, so that decoding reads half the bytes.

Each output channel of a weight has a scale. The number of rows determines how the rows are multiplied:

- One or two rows: the rows are not quantized. The weights are converted to a wider type in registers.
- Up to `FEW_ROWS` rows: the rows are quantized too, and a kernel of this project multiplies in FP8.
- More rows: the rows are quantized too, and torch's own product multiplies in FP8.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.kernels.quantize_rows import quantize_rows
from outrider.kernels.skinny_gemm import project
from outrider.kernels.stream import FEW_ROWS
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.modules import Attention, DecoderLayer, GatedMLP

_LIBRARY_MULTIPLE = 16
"""For the library's FP8 products, both sizes of a weight must be multiples of this number."""


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight ``[out, in]`` in e4m3, and the scale of each row, ``[out] fp32``."""
    return quantize_rows(weight)


class Fp8Linear(Linear):
    """``x @ (weight * scales).T + bias``.

    Args:
        weight: ``[out, in]``, e4m3, contiguous.
        scales: ``[out] fp32``.
        bias: ``[out]`` or None.
    """

    __slots__ = ("_scales",)

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._scales = scales
        self.nbytes = weight.nbytes + scales.nbytes

    @classmethod
    def of(cls, linear: Linear) -> Fp8Linear:
        """Quantize a linear layer.

        Raises:
            TypeError: The weight is packed for a CPU, split over several processes, or in FP8 already.
        """
        if type(linear) is not Linear or linear.packed:
            raise TypeError("FP8 weights can only be made from whole bf16, fp16 or (on a GPU) fp32 weights")
        return cls(*quantize_weight(linear.weight), linear.bias)

    @property
    def rounded(self) -> bool:
        """Always True."""
        return True

    @property
    def scales(self) -> torch.Tensor:
        """``[out] fp32``, the scale of each row of the weight."""
        return self._scales

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ (weight * scales).T``, ``[rows, out]``, without the bias."""
        if x.shape[0] > FEW_ROWS and x.is_cuda:
            if any(size % _LIBRARY_MULTIPLE for size in self._weight.shape):
                return torch.cat(
                    [self.product(x[first : first + FEW_ROWS]) for first in range(0, x.shape[0], FEW_ROWS)]
                )
            rows, row_scales = quantize_rows(x)
            return torch._scaled_mm(
                rows, self._weight.t(), row_scales[:, None], self._scales[None, :], out_dtype=x.dtype
            )
        if x.is_cuda:
            parts = project(x, self._weight, scales=self._scales)
            return parts.sum(0).to(x.dtype) if parts.dim() == 3 else parts
        return functional.linear(x, self._weight.to(x.dtype)) * self._scales.to(x.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, out]`` for ``x [rows, in]``."""
        out = self.product(x)
        return out if self.bias is None else out.add_(self.bias)

    def plus(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``residual + self(x)``, ``[rows, out]``, as a new tensor."""
        return self(x).add_(residual)


def quantize_layer(layer: DecoderLayer) -> DecoderLayer:
    """Convert the projections of a decoder layer to FP8 in place, and return the layer.

    Projections that are in FP8 already are not changed.

    Raises:
        TypeError: The layer is not plain attention with a dense MLP, or a weight cannot be quantized.
    """
    if type(layer.attention) is not Attention or type(layer.mlp) is not GatedMLP:
        raise TypeError(
            "FP8 weights need a dense decoder with plain attention, but a layer has "
            f"{type(layer.attention).__name__}"
        )
    if layer.attention.qkv.rounded:
        return layer
    layer.attention.qkv = Fp8Linear.of(layer.attention.qkv)
    layer.attention.o = Fp8Linear.of(layer.attention.o)
    layer.mlp.gate_up = Fp8Linear.of(layer.mlp.gate_up)
    layer.mlp.down = Fp8Linear.of(layer.mlp.down)
    return layer
