"""Moves a checkpoint's FP8 cache scales (``k_scale``, ``v_scale``) into the model's weights during loading.

A scale s belongs to the keys or to the values of a layer. The KV cache stores K / s or V / s, so that the
largest numbers just fit into the type e4m3. No kernel needs the scales, because the weights are changed as
follows:

- Keys are divided by the scale of the keys. Queries are multiplied by the same scale. The attention scores do
  not change.
- Values are divided by the scale of the values. The weight of the output projection is multiplied by the same
  scale. The results of this projection do not change.

Scales are rounded up to powers of two. In fp32 and bf16, multiplication by a power of two is exact. If the
cache is not FP8, the outputs of the model therefore stay bit-identical.

The accepted tensor names are those of vLLM's `maybe_remap_kv_scale_name`, which covers compressed-tensors,
ModelOpt and Quark.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.checkpoint.tensor_file import TensorInfo
from outrider.shared.nn.checkpoint.tensor_source import TensorShape, TensorSource
from outrider.shared.nn.config.model_config import ModelConfig

SPELLINGS = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")
"""Names of scales after the prefix ``self_attn.``, where ``{0}`` stands for k or v."""


def find_scales(stored: Mapping[str, TensorInfo], config: ModelConfig) -> dict[str, TensorShape]:
    """Return the names and shapes of the FP8 cache scales (``k_scale``, ``v_scale``) among `stored`.

    Models with multi-head latent attention have no such scales.

    Raises:
        CheckpointError: A scale is not a single number.
    """
    found: dict[str, TensorShape] = {}
    for layer, part, spelling in product(range(0 if config.latent else config.num_layers), "kv", SPELLINGS):
        name = f"model.layers.{layer}.self_attn.{spelling.format(part)}"
        if name not in stored:
            continue
        shape = stored[name].shape
        if math.prod(shape) != 1:
            raise CheckpointError(
                f"{name} is {list(shape)}; a layer's cache must have one scale for K and one for V.",
                field=name,
            )
        found[name] = shape
    return found


def read_scales(reader: CheckpointReader, found: Collection[str]) -> dict[str, float]:
    """Read the FP8 cache scales of a checkpoint, and round them up to powers of two.

    Args:
        reader: The open checkpoint.
        found: Names from `find_scales`.

    Returns:
        The scales, by name. A name is the prefix of the tensors of one attention layer, followed by k or v
        (``….self_attn.k``).

    Raises:
        CheckpointError: A scale is not a positive number.
    """
    scales = {}
    for name in found:
        value = reader.number(name)
        if not 0 < value < math.inf:
            raise CheckpointError(
                f"{name} is {value:g}, but a scale must be a positive number; download the checkpoint again.",
                field=name,
            )
        prefix, _, rest = name.rpartition(".self_attn.")
        scales[f"{prefix}.self_attn.{rest[0]}"] = 2.0 ** math.ceil(math.log2(value))
    return scales


class ScaledSource(TensorSource):
    """A `TensorSource` whose attention weights produce K and V that are divided by the FP8 cache scales.

    All other tensors of the source are passed on unchanged.

    Args:
        source: Supplies the stored tensors.
        scales: The result of `read_scales`.
        head_norm: True if the model norms each head of Q and K after the projection. The scale of K is then
            applied to the weights of these norms. Otherwise, the scale of K is applied to the projections of
            K and Q.
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

    def take_rows(
        self,
        parts: Sequence[tuple[str, TensorShape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return several tensors as one tensor. Each tensor that has a factor is multiplied by its factor."""
        out = self._source.take_rows(parts, dtype=dtype, to=to)
        position = 0
        for name, shape in parts:
            if name in self._factors:
                out[position : position + shape[0]] *= self._factors[name]
            position += shape[0]
        return out
