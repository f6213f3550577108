"""FP8 products (W8A8, ``--quantization fp8``): rounds a model's weights and activations to e4m3.

Weights have one scale per output channel. Activations have one scale per row, computed during the forward
pass.

A GPU has kernels for FP8 products. On a CPU, the operands are rounded in the same way and multiplied in a
wide type. The slow CPU version only serves to show how rounding changes a model's output.

The embedding and the norms keep their type. Logits are computed with a rounded copy of the output head.
"""

from __future__ import annotations

from functools import partial

import torch

from outrider.kernels._fp8 import FP8, FP8_MAX, convert
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder, OnLayer
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.layers.fp8_linear import quantize_layer
from outrider.shared.nn.layers.linear import Linear
from outrider.shared.nn.layers.modules import Attention, DecoderLayer, GatedMLP

SMALLEST_SCALE = 1e-12  # scale of a row of zeros


def round_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of a tensor to e4m3, with one scale per row.

    Args:
        tensor: ``[rows, size]``.

    Returns:
        The e4m3 rows, and their scales ``[rows, 1] fp32``. The rows multiplied by their scales approximate
        the tensor.
    """
    wide = tensor.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=SMALLEST_SCALE)
    return convert(wide / scale, FP8), scale


class RoundedLinear(Linear):
    """Linear layer on a CPU whose operands are rounded to FP8: ``x @ weight.T + bias``, with sums in fp32.

    Args:
        linear: Layer whose weight is rounded. No reference to this layer is kept.
    """

    __slots__ = ("_scale", "_wide")

    def __init__(self, linear: Linear) -> None:
        weight = linear._weight if linear._packed_linear is None else linear._weight.to_dense()
        rows, scale = round_rows(weight)
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.bias = linear.bias
        self.nbytes = rows.nbytes + scale.nbytes
        self._packed_linear = None
        self._weight = rows
        self._scale = scale.t()
        self._wide = Linear(rows.float())

    @property
    def rounded(self) -> bool:
        return True

    @property
    def weight(self) -> torch.Tensor:
        """Raises an error, because the weight's rows are meaningless without their scales."""
        raise AssertionError("the rows of an FP8 weight cannot be read without their scales")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, out]`` for ``x [rows, in]``."""
        rows, scale = round_rows(x)
        total = self._wide(rows.float()) * scale * self._scale
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)

    def plus(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``residual + self(x)``, ``[rows, out]``, as a new tensor."""
        return residual + self(x)


def fp8_rounding(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> OnLayer:
    """Return a function that rounds the weights of a layer to FP8.

    The returned function can be called while a model is loaded, or afterwards. During loading, at most one
    layer at a time is in its original type. The returned function raises ConfigurationError for layers
    without FP8 products.

    Raises:
        ConfigurationError: The model, its GPU or its type has no FP8 products. The error's `field` is
            ``quantization``.
    """
    if isinstance(config, GenericConfig):
        raise _refused(
            f"{config.architecture} runs through transformers' modules, which have no FP8 products"
        )
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise _refused("the GPU has no FP8 products; they need compute capability 8.9 or higher")
        if dtype is not torch.bfloat16:
            raise _refused(
                f"FP8 products return bfloat16, but the model runs in {str(dtype).removeprefix('torch.')}"
            )
    return partial(_round_layer, on_gpu=device.type == "cuda")


def _round_layer(layer: DecoderLayer, *, on_gpu: bool) -> None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
        block = attention if not isinstance(attention, Attention) else mlp
        raise _refused(f"the model has layers of an unsupported kind ({type(block).__name__})")
    if attention.qkv.rounded:
        return
    if on_gpu:
        quantize_layer(layer)
        return
    attention.qkv, attention.o = RoundedLinear(attention.qkv), RoundedLinear(attention.o)
    mlp.gate_up, mlp.down = RoundedLinear(mlp.gate_up), RoundedLinear(mlp.down)


@torch.inference_mode()
def quantize_decoder(decoder: Decoder) -> None:
    """Compute the matrix products of a decoder's layers in FP8. Call this before the first forward pass.

    Layers that were already rounded while they were loaded are not changed.

    Raises:
        ConfigurationError: The decoder's layers, GPU or type have no FP8 products. The error's `field` is
            ``quantization``.
    """
    round_layer = fp8_rounding(decoder.config, decoder.device, decoder.dtype)
    for layer in decoder.layers:
        round_layer(layer)
    if decoder.device.type == "cuda":
        decoder.quantize_fp8()
    else:
        decoder.use_rounded(RoundedLinear(Linear(decoder.lm_head)))


def _refused(why: str) -> ConfigurationError:
    return ConfigurationError(f"quantization: {why}; leave --quantization out.", field="quantization")
