"""Converts FP8 weights with one scale per block (DeepSeek-V3, Qwen3-FP8) to a wider type during loading.

The tensor ``name.weight`` is an e4m3 matrix, and ``name.weight_scale_inv`` contains its scales. In
config.json, ``weight_block_size`` contains the numbers of rows and columns of a block. The value of a weight
is the number in the matrix times the scale of the block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.shared.nn.checkpoint.json_config import ConfigReader
from outrider.shared.nn.checkpoint.tensor_file import TensorInfo
from outrider.shared.nn.checkpoint.tensor_source import ExpectedTensors, TensorShape, TensorSource

STORED = torch.float8_e4m3fn
SCALE_SUFFIX = "_scale_inv"

Block = tuple[int, int]
"""The number of rows and the number of columns of a block of weights that share a scale."""


def parse_weight_block(reader: ConfigReader) -> Block | None:
    """Return the block size of an FP8 checkpoint, or None for other checkpoints.

    Raises:
        CheckpointError: The checkpoint is FP8 but does not have one scale per block.
    """
    section = reader.raw.get("quantization_config")
    if not isinstance(section, Mapping) or section.get("quant_method") != "fp8":
        return None
    block = section.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise reader.error(
            "quantization_config",
            f"FP8 weights need weight_block_size with the rows and columns of a block, not {block!r}",
        )
    return block[0], block[1]


def expect_scales(expected: ExpectedTensors, stored: Mapping[str, TensorInfo], block: Block) -> None:
    """Add to `expected` the stored type and the scales of each FP8 matrix among the tensors `stored`."""
    for name, shape in list(expected.shapes.items()):
        if name in stored and stored[name].dtype == STORED and len(shape) == 2:
            expected.dtypes[name] = STORED
            expected.shapes[name + SCALE_SUFFIX] = _scale_shape(shape, block)


class Fp8Source(TensorSource):
    """A `TensorSource` that converts another source's FP8 matrices to a wider type.

    Other tensors are passed on unchanged.
    Args:
        source: Supplies the stored tensors.
        stored: Maps the names of all stored tensors to their shapes and types.
        block: Numbers of rows and columns that share a scale.
        dtype: Type to which FP8 matrices are converted.
    """

    def __init__(
        self, source: TensorSource, stored: Mapping[str, TensorInfo], block: Block, dtype: torch.dtype
    ) -> None:
        self._source = source
        self._stored = stored
        self._block = block
        self._dtype = dtype

    def take_rows(
        self,
        parts: Sequence[tuple[str, TensorShape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return several tensors as one tensor. Those that are stored in FP8 are widened."""
        if not any(self._narrow(name) for name, _ in parts):
            return self._source.take_rows(parts, dtype=dtype, to=to)
        out: torch.Tensor | None = None
        position, rows = 0, sum(shape[0] for _, shape in parts)
        for name, shape in parts:
            part = self._widened(name, shape) if self._narrow(name) else self._source.take(name, shape, to=to)
            if out is None:
                out = torch.empty((rows, *shape[1:]), dtype=to or self._dtype, device=part.device)
            out[position : position + shape[0]] = part
            position += shape[0]
        assert out is not None
        return out

    def _narrow(self, name: str) -> bool:
        info = self._stored.get(name)  # the other source reports a missing tensor
        return info is not None and info.dtype == STORED

    def _widened(self, name: str, shape: TensorShape) -> torch.Tensor:
        """Return the fp32 matrix of this shape: the stored matrix multiplied by its scales."""
        weight = self._source.take(name, shape, dtype=STORED).float()
        scales = self._source.take(name + SCALE_SUFFIX, _scale_shape(shape, self._block), to=torch.float32)
        for row, row_scales in enumerate(scales.unbind(0)):
            columns = row_scales.repeat_interleave(self._block[1])[: shape[1]]
            weight[row * self._block[0] : (row + 1) * self._block[0]] *= columns
        return weight


def _scale_shape(shape: TensorShape, block: Block) -> TensorShape:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
