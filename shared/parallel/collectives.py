"""The collective operations that a spread decoder needs, over `torch.distributed`: gloo on the CPU, NCCL on CUDA.

All of them are enqueued on the current stream of a CUDA device and can be captured into a CUDA graph. NVLink multicast is never used.
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
"""Multicast objects are a resource of the whole machine: a process that dies with one can put GPUs out of service that others use."""


class Collectives(Protocol):
    """What ranks do together. Every rank must make the same calls in the same order with the same shapes."""

    @property
    def rank(self) -> int:
        """Of this process."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks on each of them; `tensor` (contiguous) may have been overwritten by it."""
        ...

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill the tensor (contiguous) of the other ranks with rank 0's."""
        ...

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return ``[size, *tensor.shape]`` with every rank's tensor (contiguous) on rank 0, None on the others."""
        ...

    def lost(self) -> bool:
        """Whether this rank went on without what another did not send in time; waits for the device."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


def missed(rank: int) -> UnavailableError:
    """Return the error of a rank whose `lost` is true."""
    return UnavailableError(
        f"tp: rank {rank} did not get in time what another had to send; start the target again.",
        reason="rank_lost",
    )


class TorchCollectives:
    """`Collectives` of the default group of `torch.distributed`.

    Args:
        store: Where the ranks meet.
        rank, size: Of this process; how many there are.
        device: Of the tensors; chooses gloo or NCCL.
        timeout_s: After which a collective that a rank does not join fails.
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
        """See `Collectives.all_reduce`."""
        dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `Collectives.broadcast`."""
        dist.broadcast(tensor, 0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives.gather`."""
        if self.rank > 0:
            dist.gather(tensor, None, 0)
            return None
        out = tensor.new_empty((self.size, *tensor.shape))
        dist.gather(tensor, list(out.unbind(0)), 0)
        return out

    def lost(self) -> bool:
        """See `Collectives.lost`: they fail instead."""
        return False

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, for symmetric memory."""
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def close(self) -> None:
        """See `Collectives.close`."""
        if dist.is_initialized():
            dist.destroy_process_group()
