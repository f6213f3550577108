"""All-reduce in a decoder layer: sums over the ranks, and adds the sum to the residual.

The sums in this module use the group's own all-reduce (gloo or NCCL). For the few rows of a decode step,
NCCL's protocol takes longer than moving the data. `peer` has faster sums for GPUs that can access each
other's memory.
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
"""Largest product, in bytes, whose parts are summed over the ranks separately.

Up to this size, separate sums take less time than first adding the parts, because that addition is another
launch.
"""


class Reduce(ResidualReduce, Protocol):
    """Sums over the ranks."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a contiguous tensor over the ranks. The call may overwrite `tensor`."""
        ...


class ReduceKind(Enum):
    """How ranks exchange data.

    Attributes:
        AUTO: Small sums and messages use peer memory, if the GPUs can access it and a trial succeeds.
        ONE_SHOT: Small sums use the kernel of torch's symmetric memory. The group (NCCL) does the rest.
        GROUP: The group does everything.
    """

    AUTO = "auto"
    ONE_SHOT = "one-shot"
    GROUP = "group"


class GroupReduce:
    """Sums by the group's all-reduce.

    Args:
        collectives: Collectives over all ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks."""
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
        """Sum the parts over the ranks, then add the sum to the residual (see `Reduce.add`)."""
        whole = parts.dim() == 2 or parts.nbytes <= SUMMED_PARTS_BYTES
        summed = self(parts if whole else parts.sum(0).to(residual.dtype))
        return add_sums(summed, residual, norm_weight, eps, bias=bias, out=out)
