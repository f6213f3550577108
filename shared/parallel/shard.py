"""Splits weights over the ranks and cuts out a rank's share, as in Megatron-LM (arXiv 1909.08053, section 3).

- q, k, v, gate, up and lm_head are column-parallel: the rows of the weight are split over the ranks.
- o and down are row-parallel: the columns of the weight are split, and the products are summed over the
  ranks. The biases of o and down are whole on every rank and are added after the sum.
- The embedding and the norms are whole on every rank.
- If there are fewer K/V heads than ranks, several ranks store the same K/V head.
- In latent attention, the projections into and out of the latent space are split by heads. The projection
  that computes the cached latent is whole on every rank.
- Every rank has the whole router and a part of each expert. All ranks therefore read the same amount of
  weights, whichever experts are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig
from outrider.shared.nn.checkpoint.tensor_source import TensorShape, TensorSource
from outrider.shared.nn.config.model_config import ModelConfig
from outrider.shared.nn.generic.layout import GenericConfig

VOCABULARY_MULTIPLE = 64
"""Each rank's output head is padded to a multiple of this number of rows, which aligns the products."""

_QUERY_ROWS = ("q_proj.weight", "q_proj.bias", "sinks", "q_b_proj.weight", "kv_b_proj.weight")
_KV_ROWS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_MLP_ROWS = (
    "gate_proj.weight",
    "gate_proj.bias",
    "up_proj.weight",
    "up_proj.bias",
    ".w1.weight",
    ".w3.weight",
)
_COLUMNS = ("o_proj.weight", "down_proj.weight", ".w2.weight")
_FUSED_EXPERTS = {
    "experts.gate_up_proj": 2,
    "experts.gate_up_proj_bias": 1,
    "experts.gate_up_proj_blocks": 1,
    "experts.gate_up_proj_scales": 1,
    "experts.down_proj": 1,
    "experts.down_proj_blocks": 2,
    "experts.down_proj_scales": 2,
}
"""Maps the names of tensors that contain all experts to the dimension that is split: the intermediate size.

In gate_up tensors, this dimension has twice the intermediate size. In MXFP4 tensors, it is a number of
groups.
"""
_SUMMED = "experts.down_proj_bias"
"""A bias that would be part of every rank's product. It must be added to the sum over the ranks only once."""


@dataclass(frozen=True, slots=True)
class ShardRange:
    """A rank's part of a dimension of `whole` units: `local` units, starting with unit `first`."""

    first: int
    local: int
    whole: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a model.

    Attributes:
        rank, size: The number of this rank, and the number of ranks.
        config: Config of the whole model.
        local: The same config with this rank's number of heads and MLP sizes.
        kv_heads, columns: The K/V heads that this rank has, and its columns of the experts' intermediate
            size.
    """

    rank: int
    size: int
    config: ModelConfig
    local: ModelConfig
    kv_heads: ShardRange
    columns: ShardRange

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Return the share of `rank`.

        Raises:
            ConfigurationError: The model cannot be split over `size` ranks. The message gives the reason.
        """
        _refuse_unsplittable(config, size)
        kv_parts = min(size, config.num_kv_heads)
        columns = _expert_columns(config.experts, rank, size)
        local = replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=config.num_kv_heads // kv_parts,
            intermediate_size=config.intermediate_size // size,
            experts=_local_experts(config.experts, columns, size),
        )
        return cls(rank, size, config, local, ShardRange(rank * kv_parts // size, 1, kv_parts), columns)

    @property
    def vocabulary_rows(self) -> int:
        """Number of rows of each rank's output head, including padding.

        The first row of rank r belongs to token id ``r * vocabulary_rows``.
        """
        return -(-self.config.vocab_size // (self.size * VOCABULARY_MULTIPLE)) * VOCABULARY_MULTIPLE

    def output_head(self, table: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``table [vocab, hidden]`` as ``[vocabulary_rows, hidden]``.

        Rows past the last token id are zeros. If this rank needs no padding, the result is a view of `table`.
        """
        rows = self.vocabulary_rows
        part = table[self.rank * rows : (self.rank + 1) * rows]
        if part.shape[0] == rows:
            return part
        return torch.cat([part, part.new_zeros(rows - part.shape[0], part.shape[1])])

    def part(self, name: str) -> tuple[int, ShardRange] | None:
        """Return the split dimension of the tensor `name` and this rank's part of it.

        Return None if the tensor is not split.
        """
        if name.endswith(_QUERY_ROWS) or name.endswith(_MLP_ROWS):
            return 0, ShardRange(self.rank, 1, self.size)
        if name.endswith(_KV_ROWS):
            return 0, self.kv_heads
        if name.endswith(_COLUMNS):
            return 1, ShardRange(self.rank, 1, self.size)
        dim = _FUSED_EXPERTS.get(name.rpartition("mlp.")[2])
        return None if dim is None else (dim, self.columns)

    def leaves_out(self, name: str) -> bool:
        """Return True if only rank 0 adds the tensor `name` to the sum. This rank must then use zeros."""
        return self.rank > 0 and name.endswith(_SUMMED)


class ShardedSource:
    """A `TensorSource` that reads whole tensors from another source and cuts out a rank's parts.

    Args:
        source: Source of whole tensors.
        shard: The share to cut out.
    """

    def __init__(self, source: TensorSource, shard: Shard) -> None:
        self._source = source
        self._shard = shard

    def take(
        self,
        name: str,
        shape: TensorShape,
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return this rank's part of a tensor. `shape` is the shape of the part (see `TensorSource.take`)."""
        part = self._shard.part(name)
        if part is None:
            tensor = self._source.take(name, shape, dtype=dtype, to=to)
            return torch.zeros_like(tensor) if self._shard.leaves_out(name) else tensor
        dim, span = part
        count = shape[dim]
        whole = (*shape[:dim], count * span.whole // span.local, *shape[dim + 1 :])
        return (
            self._source.take(name, whole, dtype=dtype, to=to)
            .narrow(dim, count * span.first // span.local, count)
            .clone(memory_format=torch.contiguous_format)
        )

    def take_rows(
        self,
        parts: Sequence[tuple[str, TensorShape]],
        *,
        dtype: torch.dtype | None = None,
        to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return this rank's parts of several tensors, stacked (see `TensorSource.take_rows`)."""
        if all(self._shard.part(name) is None for name, _ in parts):
            return self._source.take_rows(parts, dtype=dtype, to=to)
        rows, position = sum(shape[0] for _, shape in parts), 0
        out: torch.Tensor | None = None
        for name, shape in parts:  # Read one whole tensor at a time, to limit the memory.
            part = self.take(name, shape, dtype=dtype, to=to)
            if out is None:
                out = part.new_empty((rows, *shape[1:]))
            out[position : position + shape[0]] = part
            position += shape[0]
        assert out is not None
        return out


def _refuse_unsplittable(config: ModelConfig, size: int) -> None:
    if isinstance(config, GenericConfig):
        raise _refused(f"models that run through transformers ({config.model_type}) cannot be split")
    sizes = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.experts is not None:
        columns, grain = config.experts.intermediate_size, config.experts.files.grain
        sizes = {"num_attention_heads": config.num_heads}
        if grain == 1:
            sizes["moe_intermediate_size"] = columns
        elif columns < size * grain:
            raise _refused(
                f"the model's experts have intermediate_size {columns}, fewer than {size} groups of {grain}"
            )
        if not all(config.sparse):
            sizes["intermediate_size"] = config.intermediate_size
        if config.experts.shared_size:
            sizes["shared expert's intermediate size"] = config.experts.shared_size
    for field, value in sizes.items():
        if value % size:
            raise _refused(f"{field} {value} of the model is not a multiple of {size}")
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise _refused(f"neither num_key_value_heads {kv_heads} of the model nor {size} divides the other")


def _refused(problem: str) -> ConfigurationError:
    return ConfigurationError(f"tp: {problem}; choose another --tp (1 always works).", field="tp")


def _expert_columns(experts: ExpertsConfig | None, rank: int, size: int) -> ShardRange:
    """Return a rank's part of the experts' intermediate size.

    The length of a part is a multiple of `ExpertFiles.grain`. The parts of two ranks may differ by one grain.
    """
    if experts is None:
        return ShardRange(0, 0, 0)
    grain = experts.files.grain
    first, last = (
        rank_or_next * (experts.intermediate_size // grain) // size * grain
        for rank_or_next in (rank, rank + 1)
    )
    return ShardRange(first, last - first, experts.intermediate_size)


def _local_experts(experts: ExpertsConfig | None, columns: ShardRange, size: int) -> ExpertsConfig | None:
    if experts is None:
        return None
    return replace(experts, intermediate_size=columns.local, shared_size=experts.shared_size // size)
