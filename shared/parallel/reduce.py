"""All-reduce in a decoder layer: sums a tensor over the ranks, and adds the sum to the residual.

This module's own class, `GroupReduce`, uses the all-reduce of the group (gloo or NCCL). With the few rows of
a decode step, NCCL spends more time on its protocol than on moving data. `peer` has faster sums for GPUs that
can access each other's memory.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch

from outrider.kernels.add_norm import add_sums
from outrider.kernels.stream import ResidualStream
from outrider.shared.nn.fused.blocks import ResidualReduce
from outrider.shared.parallel.collectives import Collectives

SUMMED_PARTS_BYTES = 128 << 10
"""Largest size, in bytes, of partial sums that a rank sends without adding them up first.

A rank's product may consist of several partial sums. Adding them up first would need another kernel launch.
If the partial sums are small, an all-reduce of all of them takes less time than this launch.
"""


class Reduce(ResidualReduce, Protocol):
    """Sums over the ranks."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a contiguous tensor over the ranks. The call may overwrite `tensor`."""
        ...


class ReduceKind(Enum):
    """The ways in which ranks exchange data.

    Attributes:
        AUTO: Small sums and messages use peer memory if the GPUs can access each other's memory and a trial
            succeeds.
        ONE_SHOT: Small sums use a kernel of torch's symmetric memory. NCCL does everything else.
        GROUP: The process group (gloo or NCCL) does everything.
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
    ) -> ResidualStream:
        """Sum the parts over the ranks, then add the sum to the residual (see `Reduce.add`)."""
        whole = parts.dim() == 2 or parts.nbytes <= SUMMED_PARTS_BYTES
        summed = self(parts if whole else parts.sum(0).to(residual.dtype))
        return add_sums(summed, residual, norm_weight, eps, bias=bias, out=out)
