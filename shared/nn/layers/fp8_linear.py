"""Products with weights that are kept in FP8: half the bytes to read, which is what decoding waits for.

Weights have a scale per output channel. One row or two are multiplied as they are, by weights widened in registers; of more, each row is
quantised as well and the product runs in FP8: by kernels of our own up to `FEW_ROWS` rows, by the library's beyond.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.kernels.quantize_rows import quantize_rows
from outrider.kernels.skinny_gemm import project
from outrider.kernels.stream import FEW_ROWS
from outrider.shared.nn.layers.blocks import Attention, DecoderLayer, GatedMLP
from outrider.shared.nn.layers.linear import Linear

_LIBRARY_MULTIPLE = 16
"""What both sizes of a weight must be multiples of for the library's FP8 products."""


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight ``[out, in]`` in e4m3 and the scales of its rows, ``[out] fp32``."""
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
        """Quantise a linear layer.

        Raises:
            TypeError: Its weight was re-laid for a CPU, is spread over processes, or in FP8 already.
        """
        if type(linear) is not Linear or linear.packed:
            raise TypeError("FP8 weights are made of whole bf16, fp16 or (on a GPU) fp32 weights")
        return cls(*quantize_fp8(linear.weight), linear.bias)

    @property
    def rounded(self) -> bool:
        """See `Linear.rounded`."""
        return True

    @property
    def scales(self) -> torch.Tensor:
        """See `Linear.scales`."""
        return self._scales

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """See `Linear.product`."""
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
    """Keep the projections of a layer with plain attention and a dense MLP in FP8, if they are not yet; returns it.

    Raises:
        TypeError: The layer, or one of its weights, is of another kind.
    """
    if type(layer.attention) is not Attention or type(layer.mlp) is not GatedMLP:
        raise TypeError(
            f"FP8 weights are for dense decoders with plain attention, not for {type(layer.attention).__name__}"
        )
    if layer.attention.qkv.rounded:
        return layer
    layer.attention.qkv = Fp8Linear.of(layer.attention.qkv)
    layer.attention.o = Fp8Linear.of(layer.attention.o)
    layer.mlp.gate_up = Fp8Linear.of(layer.mlp.gate_up)
    layer.mlp.down = Fp8Linear.of(layer.mlp.down)
    return layer
