"""What a rank holds of a decoder: its attention heads, its part of every MLP, its rows of the output head; the embedding and norms whole.

Column-parallel (rows of the weight are split): q, k, v, gate, up, lm_head. Row-parallel (columns are split, the products are summed over
the ranks): o and down; their biases are whole on every rank, and added after the sum. With fewer K/V heads than ranks, ranks that share a
K/V head each hold it.
Source of the scheme: Megatron-LM, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.config import ModelConfig
from outrider.shared.nn.expert_files import SeparateExperts
from outrider.shared.nn.generic.layout import GenericConfig
from outrider.shared.nn.loader import Shape, TensorSource
from outrider.shared.nn.traits import ExpertsConfig

VOCABULARY_MULTIPLE = 64
"""A rank's rows of the output head are padded to this: products and gathered rows stay aligned."""

_QUERY_ROWS = ("q_proj.weight", "q_proj.bias", "sinks")
_KV_ROWS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_MLP_ROWS = ("gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias", ".w1.weight", ".w3.weight")
_COLUMNS = ("o_proj.weight", "down_proj.weight", ".w2.weight")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a model.

    Attributes:
        rank, size: Which of how many.
        config: Of the whole model.
        local: The same with this rank's numbers of heads and sizes of MLPs.
        kv_parts, kv_part: Into how many parts K and V are split, and which of them this rank holds.
    """

    rank: int
    size: int
    config: ModelConfig
    local: ModelConfig
    kv_parts: int
    kv_part: int

    @classmethod
    def of(cls, config: ModelConfig, rank: int, size: int) -> Shard:
        """Return the share of `rank`.

        Raises:
            ConfigurationError: The model cannot be split over `size` ranks; says why.
        """
        _refuse_unsplittable(config, size)
        kv_parts = min(size, config.num_kv_heads)
        local = replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=config.num_kv_heads // kv_parts,
            intermediate_size=config.intermediate_size // size,
            experts=_local_experts(config.experts, size),
        )
        return cls(rank, size, config, local, kv_parts, rank * kv_parts // size)

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the output head per rank, padding included; rank r has the ids from ``r * vocabulary_rows`` on."""
        return -(-self.config.vocab_size // (self.size * VOCABULARY_MULTIPLE)) * VOCABULARY_MULTIPLE

    def output_head(self, table: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``table [vocab, hidden]``: ``[vocabulary_rows, hidden]``, zeros behind the last id.

        It shares the table's memory where no padding is needed.
        """
        rows = self.vocabulary_rows
        part = table[self.rank * rows : (self.rank + 1) * rows]
        if part.shape[0] == rows:
            return part
        return torch.cat([part, part.new_zeros(rows - part.shape[0], part.shape[1])])

    def part(self, name: str) -> tuple[int, int, int] | None:
        """Return (dimension, parts, this rank's part) of the tensor `name`, or None when every rank holds it whole."""
        if name.endswith(_QUERY_ROWS) or name.endswith(_MLP_ROWS):
            return 0, self.size, self.rank
        if name.endswith(_KV_ROWS):
            return 0, self.kv_parts, self.kv_part
        return (1, self.size, self.rank) if name.endswith(_COLUMNS) else None


class ShardedSource:
    """A `TensorSource` that is asked for a rank's shapes, takes whole tensors from another one and cuts them.

    Args:
        source: Of whole tensors.
        shard: Whose parts are wanted.
    """

    def __init__(self, source: TensorSource, shard: Shard) -> None:
        self._source = source
        self._shard = shard

    def take(self, name: str, shape: Shape, *, dtype: torch.dtype | None = None, to: torch.dtype | None = None) -> torch.Tensor:
        """Return this rank's part of a tensor, of the rank's `shape`; see `TensorSource.take`."""
        part = self._shard.part(name)
        if part is None:
            return self._source.take(name, shape, dtype=dtype, to=to)
        dim, parts, index = part
        whole = (*shape[:dim], shape[dim] * parts, *shape[dim + 1 :])
        return (
            self._source.take(name, whole, dtype=dtype, to=to)
            .narrow(dim, index * shape[dim], shape[dim])
            .clone(memory_format=torch.contiguous_format)
        )

    def take_rows(
        self, parts: Sequence[tuple[str, Shape]], *, dtype: torch.dtype | None = None, to: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return this rank's parts of several tensors, one behind the other; see `TensorSource.take_rows`."""
        if all(self._shard.part(name) is None for name, _ in parts):
            return self._source.take_rows(parts, dtype=dtype, to=to)
        rows, position = sum(shape[0] for _, shape in parts), 0
        out: torch.Tensor | None = None
        for name, shape in parts:  # one whole tensor at a time beside the result
            part = self.take(name, shape, dtype=dtype, to=to)
            if out is None:
                out = part.new_empty((rows, *shape[1:]))
            out[position : position + shape[0]] = part
            position += shape[0]
        assert out is not None
        return out


def _refuse_unsplittable(config: ModelConfig, size: int) -> None:
    if isinstance(config, GenericConfig):
        raise _refused(f"models that run through transformers ({config.model_type}) are not split")
    if config.latent is not None:
        raise _refused(f"the latent attention of {config.model_type} is not split")
    if config.experts is not None and not isinstance(config.experts.files, SeparateExperts):
        raise _refused(f"the fused experts of {config.model_type} are not split")
    sizes = {"num_attention_heads": config.num_heads, "intermediate_size": config.intermediate_size}
    if config.experts is not None:
        sizes = {"num_attention_heads": config.num_heads, "moe_intermediate_size": config.experts.intermediate_size}
        if not all(config.sparse):
            sizes["intermediate_size"] = config.intermediate_size
        if config.experts.shared_size:
            sizes["shared expert's intermediate size"] = config.experts.shared_size
    for field, value in sizes.items():
        if value % size:
            raise _refused(f"{field} {value} of the model is no multiple of {size}")
    kv_heads = config.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise _refused(f"num_key_value_heads {kv_heads} of the model and {size} do not divide each other")


def _refused(problem: str) -> ConfigurationError:
    return ConfigurationError(f"tp: {problem}; choose another --tp (1 always works).", field="tp")


def _local_experts(experts: ExpertsConfig | None, size: int) -> ExpertsConfig | None:
    if experts is None:
        return None
    return replace(experts, intermediate_size=experts.intermediate_size // size, shared_size=experts.shared_size // size)
