"""FP8 products (W8A8): weights in e4m3 with a scale per output channel, activations in e4m3 with a scale per row, made as they come.

On a GPU the decoder runs kernels for them. A CPU has no FP8: there operands are rounded alike and multiplied wide, which costs time and is
for the numbers, so that what the rounding does to a model can be seen anywhere. Embedding and norms keep their type; logits come from a
rounded copy of the output head.
"""

from __future__ import annotations

from functools import partial

import torch

from outrider.kernels._fp8 import FP8, FP8_MAX, convert
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.decoder import Decoder, OnLayer
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.layers.blocks import Attention, DecoderLayer, GatedMLP
from outrider.shared.nn.layers.fp8_linear import quantize_layer
from outrider.shared.nn.layers.linear import Linear

SMALLEST_SCALE = 1e-12  # of a row of zeros


def round_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 rows and their scales, ``[rows, 1] fp32``, whose product is near the tensor ``[rows, size]``."""
    wide = tensor.float()
    scale = (wide.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=SMALLEST_SCALE)
    return convert(wide / scale, FP8), scale


class RoundedLinear(Linear):
    """``x @ weight.T + bias`` with both operands rounded to FP8 and fp32 sums, on a CPU.

    Args:
        linear: What is rounded; it is not kept.
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
        """See `Linear.rounded`."""
        return True

    @property
    def weight(self) -> torch.Tensor:
        """Not to be had: who reads rows would miss their scales."""
        raise AssertionError("an FP8 weight has no rows without their scales")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, out]`` for ``x [rows, in]``."""
        rows, scale = round_rows(x)
        total = self._wide(rows.float()) * scale * self._scale
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)

    def plus(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``residual + self(x)``, ``[rows, out]``, as a new tensor."""
        return residual + self(x)


def fp8_rounding(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> OnLayer:
    """Return what rounds a layer's products to FP8: while a model is loaded, so that no more than one layer is wide at once, or after.

    The function raises ConfigurationError for layers of a kind that has no FP8 products.

    Raises:
        ConfigurationError: The model, its GPU or its type have none; `field` is the setting.
    """
    if isinstance(config, GenericConfig):
        raise _refused(f"{config.architecture} runs through transformers' modules")
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < (8, 9):
            raise _refused("the GPU has no FP8 products (compute capability 8.9 or higher has)")
        if dtype is not torch.bfloat16:
            raise _refused(
                f"FP8 products give bfloat16, and the model runs in {str(dtype).removeprefix('torch.')}"
            )
    return partial(_round_layer, on_gpu=device.type == "cuda")


def _round_layer(layer: DecoderLayer, *, on_gpu: bool) -> None:
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
        block = attention if not isinstance(attention, Attention) else mlp
        raise _refused(f"the model has layers of another kind ({type(block).__name__})")
    if attention.qkv.rounded:
        return
    if on_gpu:
        quantize_layer(layer)
        return
    attention.qkv, attention.o = RoundedLinear(attention.qkv), RoundedLinear(attention.o)
    mlp.gate_up, mlp.down = RoundedLinear(mlp.gate_up), RoundedLinear(mlp.down)


@torch.inference_mode()
def quantize_fp8(decoder: Decoder) -> None:
    """Compute the products of a decoder's layers in FP8 from now on; call before its first pass.

    Layers that were rounded while they were loaded stay as they are.

    Raises:
        ConfigurationError: The decoder's layers, its GPU or its type have no FP8 products; `field` is the setting.
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
