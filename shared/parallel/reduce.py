"""Sums over the ranks, and what is done with them in a decoder layer: the addition to the residual.

Many rows go through the group's own all-reduce (gloo, NCCL). For the few rows of decoding NCCL's protocol takes longer than the data: on
GPUs that reach each other's memory one kernel exchanges, adds up and prepares the next norm (`exchange_add`), sixty-four times a step of a
model of 8 billion weights.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist

from outrider.kernels.add_norm import add_sums
from outrider.kernels.exchange_add import Boxes, can_exchange, exchange_add, inbox_shape
from outrider.kernels.stream import FEW_ROWS, Stream
from outrider.shared.obs.logging import get_logger
from outrider.shared.parallel.collectives import Collectives, TorchCollectives

ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
LOOKS_PER_SECOND = 1_000_000
"""How often `exchange_add` looks for a word, about: as often as the device's L2 answers."""

_log = get_logger("outrider.parallel")


class Reduce(Protocol):
    """How the ranks sum."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of a contiguous tensor, which may have been overwritten."""
        ...

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
        """Return the residual stream after ``residual + sum over ranks of parts + bias``; the arguments are those of `add_sums`."""
        ...


class ReduceKind(Enum):
    """How sums are made: AUTO writes into the other GPUs' memory where it can."""

    AUTO = "auto"
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
        summed = self(parts.sum(0).to(residual.dtype) if parts.dim() == 3 else parts)
        return add_sums(summed, residual, norm_weight, eps, bias=bias, out=out)


class PeerReduce(GroupReduce):
    """`Reduce` by kernels that reach the other ranks' memory, for few rows.

    Used from one stream at a time: consecutive sums share the memory.

    Args:
        collectives: Of all ranks; what is too large for this, or neither fp32 nor bf16, goes through them.
        hidden_size, dtype: Of the rows.
        timeout_s: After which a rank is lost for whom `add` waits: its rows are then no numbers, which no token is chosen from.

    Raises:
        RuntimeError: This machine shares no memory between processes.
    """

    def __init__(self, collectives: TorchCollectives, hidden_size: int, dtype: torch.dtype, timeout_s: float) -> None:
        super().__init__(collectives)
        import torch.distributed._symmetric_memory as symmetric_memory

        self._name = collectives.group.group_name
        self._memory = symmetric_memory.empty(
            FEW_ROWS * hidden_size * dtype.itemsize, dtype=torch.uint8, device=collectives.device
        )  # fmt: skip
        symmetric_memory.rendezvous(self._memory, collectives.group)
        shape = inbox_shape(collectives.size, hidden_size)
        self._inbox = symmetric_memory.empty(*shape, dtype=torch.int32, device=collectives.device)
        handle = symmetric_memory.rendezvous(self._inbox, collectives.group)
        inboxes = [
            self._inbox if rank == collectives.rank else handle.get_buffer(rank, shape, torch.int32) for rank in range(collectives.size)
        ]
        self._boxes = Boxes.of(collectives.rank, inboxes, min(int(timeout_s * LOOKS_PER_SECOND), 2**31 - 1))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Reduce.__call__`."""
        if tensor.nbytes > self._memory.numel() or tensor.dtype not in ONE_SHOT_DTYPES:
            return super().__call__(tensor)
        shared = self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, tensor, "sum", self._name)
        return summed

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
        rows, width = residual.shape
        if not can_exchange(rows, width, self._boxes):
            return super().add(parts, residual, norm_weight, eps, bias=bias, out=out)
        return exchange_add(parts, residual, norm_weight, eps, self._boxes, bias=bias, out=out)


def make_reduce(
    collectives: Collectives, hidden_size: int, dtype: torch.dtype, kind: ReduceKind, timeout_s: float, *, one_host: bool
) -> Reduce:
    """Return the fastest sum that all ranks can take part in; every rank calls it, with the same arguments.

    Args:
        collectives: Of all ranks.
        hidden_size, dtype: Of the rows.
        kind: What was asked for.
        timeout_s: How long a rank is waited for.
        one_host: Whether all ranks run on one machine.
    """
    if not isinstance(collectives, TorchCollectives) or collectives.device.type != "cuda" or kind is ReduceKind.GROUP:
        return GroupReduce(collectives)
    if not one_host or dtype not in ONE_SHOT_DTYPES:
        return GroupReduce(collectives)
    device = collectives.device
    first = (device.index or 0) - collectives.rank
    reachable = all(
        peer == device.index or torch.cuda.can_device_access_peer(device, peer) for peer in range(first, first + collectives.size)
    )
    reduce: PeerReduce | None = None
    if _agreed(reachable, device):
        try:
            reduce = PeerReduce(collectives, hidden_size, dtype, timeout_s)
        except RuntimeError as error:  # a driver or a sandbox that shares no memory between processes
            _log.warning("no symmetric memory; NCCL adds up", error=str(error).splitlines()[0])
    if _agreed(reduce is not None, device) and reduce is not None:
        _log.info("sums through peer memory", ranks=collectives.size, rows=FEW_ROWS)
        return reduce
    return GroupReduce(collectives)


def _agreed(able: bool, device: torch.device) -> bool:
    """Whether every rank is able; what each has put into its own memory before is there when this returns."""
    flag = torch.tensor([int(able)], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
