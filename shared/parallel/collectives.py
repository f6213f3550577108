"""The collective operations of a sharded decoder, over `torch.distributed`: gloo on the CPU, NCCL on CUDA.

On CUDA, every operation is enqueued on the current stream and can be captured into a CUDA graph. NVLink
multicast is never used.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from outrider.shared.base.errors import UnavailableError

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Environment variables that turn NVLink multicast off.

Multicast objects are a resource of the whole machine. If a process dies while it owns such an object, GPUs
that other processes use may become unusable.
"""


class Collectives(Protocol):
    """Interface of the collective operations, in which all ranks take part.

    Every rank must make the same calls in the same order with tensors of the same shapes.
    """

    @property
    def rank(self) -> int:
        """Rank of this process."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, on every rank.

        The call may overwrite `tensor`, which must be contiguous.
        """
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor into `tensor` on all other ranks. `tensor` must be contiguous."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return all ranks' tensors, ``[size, *tensor.shape]``, on rank 0. Return None on the other ranks.

        `tensor` must be contiguous.
        """
        ...

    def lost(self) -> bool:
        """Return True if this rank stopped waiting for another rank's data and continued without the data.

        The call waits for the device.
        """
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


def missed(rank: int) -> UnavailableError:
    """Return the error to raise on a rank whose `Collectives.lost` returns True."""
    return UnavailableError(
        f"tp: rank {rank} did not receive another rank's data in time; start the target again.",
        reason="rank_lost",
    )


class TorchCollectives:
    """`Collectives` over the default group of `torch.distributed`.

    Args:
        store: The ranks' common store, used to form the group.
        rank, size: This process's rank and the number of ranks.
        device: Device of the tensors. It selects gloo or NCCL.
        timeout_s: Seconds after which a collective fails if a rank has not joined it.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        cuda = device.type == "cuda"
        if cuda:
            os.environ.update(NO_MULTICAST)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if cuda else None,
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up the tensors of all ranks in place, and return `tensor`."""
        dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor to the other ranks."""
        dist.broadcast(tensor, 0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return all ranks' tensors on rank 0 and None elsewhere."""
        if self.rank > 0:
            dist.gather(tensor, None, 0)
            return None
        out = tensor.new_empty((self.size, *tensor.shape))
        dist.gather(tensor, list(out.unbind(0)), 0)
        return out

    def lost(self) -> bool:
        """Return False. A collective of this class fails when a rank is late, so no rank continues alone."""
        return False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, which symmetric memory needs."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def close(self) -> None:
        """Destroy the group if it exists."""
        if dist.is_initialized():
            dist.destroy_process_group()
