"""Scales of an FP8 cache that a checkpoint brings (``k_scale``, ``v_scale``), moved into its weights as they are loaded.

What is stored is K / s and V / s, so that the largest ones just fit into e4m3. Keys divided by s and queries multiplied by s give the same
scores, and values divided by s the same sum behind an output projection multiplied by s: no kernel has to know. Scales are rounded up to
powers of two, by which multiplying is exact in fp32 and bf16, so that with a wide cache no bit of the output changes.

Spellings as vLLM reads them (`maybe_remap_kv_scale_name`): those of compressed-tensors, ModelOpt and Quark.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.tensor_file import TensorInfo
from outrider.shared.nn.checkpoint.tensor_source import Shape, TensorSource
from outrider.shared.nn.config.model_config import ModelConfig

SPELLINGS = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")
"""Behind ``self_attn.``, of k or v."""


def find_scales(stored: Mapping[str, TensorInfo], config: ModelConfig) -> dict[str, Shape]:
    """Return name → shape of the scales of the layers' caches among `stored`; a latent has none.

    Raises:
        CheckpointError: One is not a single number.
    """
    found: dict[str, Shape] = {}
    for layer, part, spelling in product(range(0 if config.latent else config.num_layers), "kv", SPELLINGS):
        name = f"model.layers.{layer}.self_attn.{spelling.format(part)}"
        if name not in stored:
            continue
        shape = stored[name].shape
        if math.prod(shape) != 1:
            raise CheckpointError(
                f"{name} is {list(shape)}; the cache of a layer has one scale for K and one for V.",
                field=name,
            )
        found[name] = shape
    return found


def read_scales(reader: CheckpointReader, found: Collection[str]) -> dict[str, float]:
    """Return prefix of an attention and part (``….self_attn.k``) → the power of two that is its scale or the next above it.

    Raises:
        CheckpointError: A scale is not a number above 0.
    """
    scales = {}
    for name in found:
        value = reader.number(name)
        if not 0 < value < math.inf:
            raise CheckpointError(
                f"{name} is {value:g}; a scale is a number above 0. Download the checkpoint again.",
                field=name,
            )
        prefix, _, rest = name.rpartition(".self_attn.")
        scales[f"{prefix}.self_attn.{rest[0]}"] = 2.0 ** math.ceil(math.log2(value))
    return scales


class ScaledSource(TensorSource):
    """A `TensorSource` whose attention weights give K and V divided by their scales; everything else of another source passes.

    Args:
        source: Of the stored tensors.
        scales: See `read_scales`.
        head_norm: Whether a norm of each head of Q and K follows their projections: it carries the scale of K then.
    """

    def __init__(self, source: TensorSource, scales: Mapping[str, float], *, head_norm: bool) -> None:
        self._source = source
        self._factors: dict[str, float] = {}
        for name, scale in scales.items():
            prefix, part = name[:-1], name[-1]
            if part == "v":
                changes = {"v_proj.weight": 1 / scale, "v_proj.bias": 1 / scale, "o_proj.weight": scale}
            elif head_norm:
                changes = {"k_norm.weight": 1 / scale, "q_norm.weight": scale}
            else:
                keys = {f"k_proj.{kind}": 1 / scale for kind in ("weight", "bias")}
                changes = keys | {f"q_proj.{kind}": scale for kind in ("weight", "bias")}
            self._factors |= {prefix + end: factor for end, factor in changes.items()}

    def take(
        self, name: str, shape: Shape, *, dtype: torch.dtype | None = None, to: torch.dtype | None = None
    ) -> torch.Tensor:
        """See `TensorSource.take`."""
        return self.take_rows([(name, shape)], dtype=dtype, to=to)

    def take_rows(
        self,
        parts: Sequence[tuple[str, Shape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See `TensorSource.take_rows`."""
        out = self._source.take_rows(parts, dtype=dtype, to=to)
        position = 0
        for name, shape in parts:
            if name in self._factors:
                out[position : position + shape[0]] *= self._factors[name]
            position += shape[0]
        return out
