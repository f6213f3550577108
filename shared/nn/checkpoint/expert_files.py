"""Loads the experts of a layer from the layouts that checkpoints use, and de-quantizes MXFP4 weights.

Every layout is converted to the stacked tensors of `ExpertWeights`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig, ExpertWeights
from outrider.shared.nn.checkpoint.tensor_source import TensorSource

MXFP4_GROUP = 32  # number of values that share a scale
# Magnitudes, indexed by the three low bits of a four-bit value. The fourth bit is the sign.
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_SCALE_BIAS = 127
MXFP4_SCALE_NAN = 255
MXFP4_SCALES = "_scales"  # suffix of the names of scale tensors


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Layout of experts in a checkpoint, with three matrices per expert.

    Attributes:
        router: Name of the router's tensor, without the prefix of the layer.
        expert: Prefix of the tensors of one expert, with ``{}`` for the expert's index.
        gate, up, down: Names of an expert's matrices, without the prefixes of layer and expert.
        grain: Granularity of the intermediate size; see `ExpertFiles.grain`.
    """

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    grain: int = 1

    def load(
        self, source: TensorSource, prefix: str, config: ExpertsConfig, hidden_size: int
    ) -> ExpertWeights:
        """Load the experts of the layer whose tensors start with `prefix`."""
        size, experts = (
            config.intermediate_size,
            [prefix + self.expert.format(index) for index in range(config.num_experts)],
        )
        gate_up = source.take_rows(
            [
                (f"{expert}{name}.weight", (size, hidden_size))
                for expert in experts
                for name in (self.gate, self.up)
            ]
        )
        down = source.take_rows([(f"{expert}{self.down}.weight", (hidden_size, size)) for expert in experts])
        return ExpertWeights(gate_up.view(-1, 2 * size, hidden_size), down.view(-1, hidden_size, size))


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Layout of the experts of gpt-oss in bf16: a single tensor contains the matrices of all experts.

    The input dimension of each matrix comes before the output dimension. In a gate_up matrix, the columns of
    the gate and up projections alternate.
    """

    router: str = "mlp.router"
    grain: int = 1

    def load(
        self, source: TensorSource, prefix: str, config: ExpertsConfig, hidden_size: int
    ) -> ExpertWeights:
        """Load the experts of the layer whose tensors start with `prefix`."""
        experts, size = config.num_experts, config.intermediate_size
        gate_up = source.take(
            f"{prefix}mlp.experts.gate_up_proj", (experts, hidden_size, 2 * size)
        ).transpose(1, 2)
        down = source.take(f"{prefix}mlp.experts.down_proj", (experts, size, hidden_size)).transpose(1, 2)
        return ExpertWeights(
            _gate_first(gate_up), down.contiguous(), *_fused_biases(source, prefix, config, hidden_size)
        )


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """Layout of the experts of gpt-oss as released: MXFP4, which is de-quantized during loading.

    An MXFP4 block consists of 32 four-bit values and an eight-bit exponent that they share.
    """

    router: str = "mlp.router"
    grain: int = MXFP4_GROUP

    def load(
        self, source: TensorSource, prefix: str, config: ExpertsConfig, hidden_size: int
    ) -> ExpertWeights:
        """Load the experts of the layer whose tensors start with `prefix`."""
        experts, size = config.num_experts, config.intermediate_size
        biases = _fused_biases(source, prefix, config, hidden_size)
        parts = []
        for name, rows, columns in (
            ("gate_up_proj", 2 * size, hidden_size),
            ("down_proj", hidden_size, size),
        ):
            groups = columns // MXFP4_GROUP
            block_shape = (experts, rows, groups, MXFP4_GROUP // 2)
            blocks = source.take(f"{prefix}mlp.experts.{name}_blocks", block_shape, dtype=torch.uint8)
            scales_name = f"{prefix}mlp.experts.{name}{MXFP4_SCALES}"
            scales = source.take(scales_name, (experts, rows, groups), dtype=torch.uint8)
            check_mxfp4_scales(scales_name, scales)
            parts.append(dequantise_mxfp4(blocks, scales, biases[0].dtype))
        return ExpertWeights(_gate_first(parts[0]), parts[1], *biases)


def check_mxfp4_scales(name: str, scales: torch.Tensor) -> None:
    """Reject MXFP4 scales that are NaN. The scales' format, E8M0, has a code for NaN but none for infinity.

    Scales are loaded as bytes. The checkpoint reader's check for NaN weights therefore does not cover them.

    Raises:
        CheckpointError: A scale is NaN. The message names the tensor.
    """
    if not scales.is_meta and bool((scales == MXFP4_SCALE_NAN).any()):
        raise CheckpointError(
            f"{name} contains NaN (the byte {MXFP4_SCALE_NAN}); the weights are damaged: "
            "download the checkpoint again.",
            field=name,
        )


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """De-quantize MXFP4 weights. Return the weights ``[experts, rows, groups * 32]``.

    The function processes one expert at a time to limit the temporary memory. The values (E2M1) and scales
    (E8M0) are those of the OCP Microscaling Formats (MX) specification 1.0.

    Args:
        blocks: ``[experts, rows, groups, 16] uint8``. Each byte contains two values, the first one in the low
            half.
        scales: ``[experts, rows, groups] uint8``, exponents of two with a bias of 127.
        dtype: Type of the result. bf16 represents every value exactly.
    """
    experts, rows, groups, half = blocks.shape
    values = torch.tensor(
        [*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)], dtype=dtype, device=blocks.device
    )
    out = torch.empty(experts, rows, groups, 2 * half, dtype=dtype, device=blocks.device)
    for weights, block, scale in zip(out.unbind(0), blocks.unbind(0), scales.unbind(0), strict=True):
        weights[..., 0::2] = values[(block & 0x0F).int()]
        weights[..., 1::2] = values[(block >> 4).int()]
        weights.copy_(torch.ldexp(weights.float(), scale.int()[..., None] - MXFP4_SCALE_BIAS))
    return out.view(experts, rows, groups * 2 * half)


def _fused_biases(
    source: TensorSource, prefix: str, config: ExpertsConfig, hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = source.take(
        f"{prefix}mlp.experts.gate_up_proj_bias", (config.num_experts, 2 * config.intermediate_size)
    )
    down = source.take(f"{prefix}mlp.experts.down_proj_bias", (config.num_experts, hidden_size))
    return _gate_first(gate_up), down


def _gate_first(alternating: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy with reordered rows (dimension 1): all rows of gate, then all rows of up."""
    return torch.cat([alternating[:, 0::2], alternating[:, 1::2]], dim=1)
