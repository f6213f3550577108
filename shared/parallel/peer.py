"""Sums and messages between ranks through peer memory, for GPUs that can access each other's memory.

The GPUs must be in one machine. With the few rows of a decode step, NCCL spends more time on its protocol
than on moving data. Peer memory is faster.

All waits have a time limit, in case another rank is alive but does not take part. After a timeout, the
affected rows are NaN, the requests end with an error, and the group of ranks ends. A dead rank is noticed
much earlier on the control channel (see `lead`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from outrider.kernels.exchange_add import Boxes, can_exchange, exchange_add, inbox_shape
from outrider.kernels.peer_words import Mail, box_shape, can_pass, receive_words, send_words
from outrider.kernels.stream import FEW_ROWS, ResidualStream
from outrider.shared.obs.logging import get_logger
from outrider.shared.parallel.collectives import Collectives, TorchCollectives
from outrider.shared.parallel.reduce import GroupReduce, Reduce, ReduceKind
from outrider.shared.parallel.trial import MESSAGES, TRIALS, messages_arrive, sums_agree

PEER_DTYPES = (torch.float32, torch.bfloat16)
MOST_WAIT_S = 300.0
"""Upper bound of every time limit, in seconds. A rank needs this time to compile and load new kernels."""
TRIAL_WAIT_S = 10.0
LOOKS_PER_SECOND = 1_000_000
"""Approximate polling rate of a waiting kernel, which is limited by the latency of the device's L2 cache."""

_log = get_logger("outrider.parallel")


class OneShotReduce(GroupReduce):
    """All-reduce of a few rows: sums them over the ranks with a kernel that reads the other ranks' memory.

    On two H200s in a CUDA graph, summing one row of 4096 bf16 numbers takes 6.4 µs, and summing 64 such rows
    takes 9.5 µs. With NCCL, each of the two sums takes 18 µs.

    All sums use the same memory, so use this object from one stream at a time.

    Args:
        collectives: Collectives over all ranks. They sum tensors that are too large for the kernel, and
            tensors that are neither fp32 nor bf16.
        hidden_size, dtype: Width and dtype of the rows.

    Raises:
        RuntimeError: Processes cannot share GPU memory on this machine.
    """

    def __init__(self, collectives: TorchCollectives, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(collectives)
        self._name = collectives.group.group_name
        self._memory = _shared(collectives, (FEW_ROWS * hidden_size * dtype.itemsize,), torch.uint8)[
            collectives.rank
        ]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks. Small fp32 and bf16 tensors are summed through peer memory."""
        if tensor.nbytes > self._memory.numel() or tensor.dtype not in PEER_DTYPES:
            return super().__call__(tensor)
        shared = self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, tensor, "sum", self._name)
        return summed


class PeerReduce(OneShotReduce):
    """All-reduce like `OneShotReduce`, but `add` runs only a single kernel, `exchange_add`.

    Args:
        collectives, hidden_size, dtype: The arguments of `OneShotReduce`.
        timeout_s: Number of seconds for which `add` waits for another rank's rows.
        lost: ``[1] int32``, set to 1 after a wait has timed out (see `Boxes.lost`).

    Raises:
        RuntimeError: Processes cannot share GPU memory on this machine.
    """

    def __init__(
        self,
        collectives: TorchCollectives,
        hidden_size: int,
        dtype: torch.dtype,
        timeout_s: float,
        lost: torch.Tensor,
    ) -> None:
        super().__init__(collectives, hidden_size, dtype)
        self._lost = lost
        self._inboxes = _shared(collectives, inbox_shape(collectives.size, hidden_size), torch.int32)
        self._width, self._dtype, self._timeout_s = hidden_size, dtype, timeout_s
        self._group = collectives
        self._boxes = self._emptied(timeout_s)

    def proves_itself(self) -> bool:
        """Return True if trial sums are correct on all ranks (see `sums_agree`). All ranks must call this."""
        # Compile all kernels first, so that a short time limit suffices for the trial. Other ranks may still
        # be compiling, so set `_lost`, which turns off all waits.
        self._lost.fill_(1)
        for rows in TRIALS:
            zeros = torch.zeros(rows, self._width, dtype=self._dtype, device=self._group.device)
            self.add(zeros, zeros, zeros[0], 1.0)
        self._boxes = self._emptied(min(self._timeout_s, TRIAL_WAIT_S))
        agrees = sums_agree(self, self._group, self._width, self._dtype, self._group.device)
        self._boxes = self._emptied(self._timeout_s)
        return agrees

    def _emptied(self, timeout_s: float) -> Boxes:
        """Wait until all messages have arrived, then empty every rank's boxes. Return this rank's boxes."""
        _agreed(True, self._group.device)
        boxes = Boxes.of(self._group.rank, self._inboxes, _looks(timeout_s), self._lost)
        _agreed(True, self._group.device)
        return boxes

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
        """Add the ranks' parts to the residual (see `Reduce.add`). For a few rows, one kernel does this."""
        rows, width = residual.shape
        if not can_exchange(rows, width, self._boxes):
            return super().add(parts, residual, norm_weight, eps, bias=bias, out=out)
        return exchange_add(parts, residual, norm_weight, eps, self._boxes, bias=bias, out=out)


class PeerCollectives:
    """Collectives that send small integer tensors through peer memory. `group` runs all other operations.

    Args:
        group: Collectives over all ranks.
        timeout_s: Number of seconds for which a rank waits for a message. After a timeout, `broadcast`
            returns zeros, which are valid slots and page numbers, and `gather` returns -1, which is not a
            token. From then on, a rank that has missed a message sends only -1 to rank 0.
        lost: ``[1] int32``, set to 1 after a wait has timed out (see `Mail.lost`).

    Raises:
        RuntimeError: Processes cannot share GPU memory on this machine.
    """

    def __init__(self, group: TorchCollectives, timeout_s: float, lost: torch.Tensor) -> None:
        self._group = group
        self._lost = lost
        self.rank, self.size = group.rank, group.size
        self._timeout_s = timeout_s
        self._boxes = [_shared(group, box_shape(group.size), torch.int64) for _ in range(2)]
        self._down, self._up = self._emptied(timeout_s)

    def proves_itself(self) -> bool:
        """Return True if trial messages arrive (see `messages_arrive`). All ranks must call this."""
        # Compile all kernels first, without waiting, as in `PeerReduce.proves_itself`.
        self._lost.fill_(1)
        for words in MESSAGES:
            message = torch.zeros(words, dtype=torch.int32, device=self._group.device)
            self.broadcast(message)
            self.gather(message)
        self._down, self._up = self._emptied(min(self._timeout_s, TRIAL_WAIT_S))
        arrive = messages_arrive(self, self._group, self._group.device)
        self._down, self._up = self._emptied(self._timeout_s)
        return arrive

    def _emptied(self, timeout_s: float) -> tuple[Mail, Mail]:
        """Empty every rank's mailboxes. Return two mailboxes: for messages from rank 0, and to rank 0."""
        _agreed(True, self._group.device)
        down, up = (Mail.of(self.rank, boxes, _looks(timeout_s), self._lost) for boxes in self._boxes)
        _agreed(True, self._group.device)
        return down, up

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, computed by the group."""
        return self._group.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor to the other ranks. Small integer tensors are sent through peer memory."""
        if not _is_small(tensor):
            self._group.broadcast(tensor)
        elif self.rank == 0:
            send_words(tensor.view(-1).view(torch.int32), self._down, range(1, self.size), missing=0)
        else:
            receive_words(tensor.view(1, -1).view(torch.int32), self._down, range(1), missing=0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return all ranks' tensors on rank 0. Small integer tensors are sent through peer memory.

        A rank that has missed a message sends NaN in place of floating-point numbers.
        """
        if not _is_small(tensor):
            return self._group.gather(
                torch.where(self._lost == 0, tensor, float("nan")) if tensor.is_floating_point() else tensor
            )
        words = tensor.view(-1).view(torch.int32)
        if self.rank > 0:
            send_words(words, self._up, range(1), missing=-1)
            return None
        out = tensor.new_empty((self.size, *tensor.shape))
        receive_words(
            out.view(self.size, -1).view(torch.int32), self._up, range(self.size), missing=-1, own=words
        )
        return out

    def lost(self) -> bool:
        """Return True if this rank has missed another rank's data. Waits for the device."""
        return bool(self._lost.item())

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def connect_peers(
    group: TorchCollectives,
    hidden_size: int,
    dtype: torch.dtype,
    kind: ReduceKind,
    timeout_s: float,
    *,
    one_host: bool,
) -> tuple[Collectives, Reduce]:
    """Return the fastest collectives and the fastest all-reduce that all ranks support.

    Every rank must call this function with the same arguments.

    Args:
        group: Collectives over all ranks.
        hidden_size, dtype: Width and dtype of the rows.
        kind: The way in which ranks exchange data, from the settings.
        timeout_s: Number of seconds for which a rank waits for another rank's data.
        one_host: True if all ranks run on one machine.
    """
    device = group.device
    if device.type != "cuda" or kind is ReduceKind.GROUP or not one_host or dtype not in PEER_DTYPES:
        return group, GroupReduce(group)
    made: tuple[Collectives, Reduce] | None = None
    if _agreed(reaches_all(device, group.rank, group.size), device):
        try:
            made = _proven(group, hidden_size, dtype, timeout_s) if kind is ReduceKind.AUTO else None
            made = made or (group, OneShotReduce(group, hidden_size, dtype))
        except RuntimeError as error:  # The driver or a sandbox forbids sharing memory between processes.
            _log.warning("no symmetric memory; sums use NCCL", error=str(error).splitlines()[0])
    if _agreed(made is not None, device) and made is not None:
        messages, sums = made
        _log.info(
            "ranks use peer memory",
            ranks=group.size,
            sums=type(sums).__name__,
            messages=type(messages).__name__,
        )
        return made
    return group, GroupReduce(group)


def _proven(
    group: TorchCollectives, hidden_size: int, dtype: torch.dtype, timeout_s: float
) -> tuple[Collectives, Reduce] | None:
    """Return collectives and sums through peer memory, or None if a trial of them fails."""
    lost = torch.zeros(1, dtype=torch.int32, device=group.device)
    messages = PeerCollectives(group, timeout_s, lost)
    sums = PeerReduce(group, hidden_size, dtype, timeout_s, lost)
    if messages.proves_itself() and sums.proves_itself():
        return messages, sums
    _log.error(
        "a trial of messages or sums through peer memory failed; falling back to NCCL and one-shot sums"
    )
    return None


def reaches_all(device: torch.device, rank: int, size: int) -> bool:
    """Return True if this rank's GPU can access the memory of all other ranks' GPUs.

    The function assumes that the ranks' GPUs have consecutive indices in the order of the ranks. It returns
    False in a process that sees only its own GPU, because such a process cannot check the other GPUs.
    """
    index = device.index or 0
    first = index - rank
    seen = torch.cuda.device_count()
    if first < 0 or first + size > seen:
        _log.warning(
            "not every rank's GPU is visible to this rank; sums use NCCL",
            rank=rank,
            device=index,
            ranks=size,
            visible=seen,
        )
        return False
    return all(
        peer == index or torch.cuda.can_device_access_peer(index, peer) for peer in range(first, first + size)
    )


def _shared(group: TorchCollectives, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Allocate, on every rank, a tensor that all ranks can write to. Return these tensors by rank."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(*shape, dtype=dtype, device=group.device)
    handle = symmetric_memory.rendezvous(own, group.group)
    return [
        own if rank == group.rank else handle.get_buffer(rank, shape, dtype) for rank in range(group.size)
    ]


def _looks(timeout_s: float) -> int:
    return int(min(timeout_s, MOST_WAIT_S) * LOOKS_PER_SECOND)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64) and can_pass(tensor.nbytes // 4)


def _agreed(able: bool, device: torch.device) -> bool:
    """Return True if `able` is true on every rank.

    The call is also a barrier: when it returns, every rank has finished its earlier writes to its own memory.
    """
    flag = torch.tensor([int(able)], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
