"""Sums over the ranks, and what is done with them in a decoder layer: the addition to the residual.

Here they go through the group's own all-reduce (gloo, NCCL), whose protocol takes longer than the data of the few rows of decoding; `peer`
has another one for GPUs that reach each other's memory.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch

from outrider.kernels.add_norm import add_sums
from outrider.kernels.stream import Stream
from outrider.shared.nn.fused.blocks import ResidualReduce
from outrider.shared.parallel.collectives import Collectives

SUMMED_PARTS_BYTES = 128 << 10
"""Up to here it takes less time to sum each part of a product over the ranks than to add the parts up before, in two launches."""


class Reduce(ResidualReduce, Protocol):
    """How the ranks sum."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of a contiguous tensor, which may have been overwritten."""
        ...


class ReduceKind(Enum):
    """How ranks exchange. AUTO: sums of few rows and small messages through peer memory, where GPUs reach it and a trial of it succeeds.

    ONE_SHOT: sums of few rows by the kernel of torch's symmetric memory there, all else by the group (NCCL). GROUP: all by the group.
    """

    AUTO = "auto"
    ONE_SHOT = "one-shot"
    GROUP = "group"


class GroupReduce:
    """`Reduce` by the group's all-reduce.

    Args:
        collectives: Of all ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Reduce.__call__`."""
        return self._collectives.all_reduce(tensor)

    def add(
        self,
        parts: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Stream:
        """See `Reduce.add`."""
        whole = parts.dim() == 2 or parts.nbytes <= SUMMED_PARTS_BYTES
        summed = self(parts if whole else parts.sum(0).to(residual.dtype))
        return add_sums(summed, residual, norm_weight, eps, bias=bias, out=out)
