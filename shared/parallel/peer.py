"""Ranks on the GPUs of one machine, which reach each other's memory: sums and messages of few rows without NCCL's protocol.

What a rank waits for in vain ends as rows that are no numbers, of which no token is chosen: requests end with an error, and the group with
them. That a rank is gone is seen on the control channel long before (`lead`); this is for one that lives and does not come.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from outrider.kernels.exchange_add import Boxes, can_exchange, exchange_add, inbox_shape
from outrider.kernels.peer_words import Mail, box_shape, can_pass, receive_words, send_words
from outrider.kernels.stream import FEW_ROWS, Stream
from outrider.shared.obs.logging import get_logger
from outrider.shared.parallel.collectives import Collectives, TorchCollectives
from outrider.shared.parallel.reduce import GroupReduce, Reduce, ReduceKind
from outrider.shared.parallel.trial import MESSAGES, TRIALS, messages_arrive, sums_agree

PEER_DTYPES = (torch.float32, torch.bfloat16)
MOST_WAIT_S = 300.0
"""Longer than a rank's host is away from launching, while it compiles and loads kernels that it meets for the first time."""
TRIAL_WAIT_S = 10.0
LOOKS_PER_SECOND = 1_000_000
"""How often a kernel that waits looks, about: as often as the device's L2 answers."""

_log = get_logger("outrider.parallel")


class OneShotReduce(GroupReduce):
    """`Reduce` of few rows by a kernel that reads the other ranks' memory.

    On two H200s in a CUDA graph 1 / 64 rows of 4096 bf16 take 6.4 / 9.5 µs against NCCL's 18 / 18.

    Used from one stream at a time: consecutive sums share the memory.

    Args:
        collectives: Of all ranks; what is too large for this, or neither fp32 nor bf16, goes through them.
        hidden_size, dtype: Of the rows.

    Raises:
        RuntimeError: This machine shares no memory between processes.
    """

    def __init__(self, collectives: TorchCollectives, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(collectives)
        self._name = collectives.group.group_name
        self._memory = _shared(collectives, (FEW_ROWS * hidden_size * dtype.itemsize,), torch.uint8)[
            collectives.rank
        ]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Reduce.__call__`."""
        if tensor.nbytes > self._memory.numel() or tensor.dtype not in PEER_DTYPES:
            return super().__call__(tensor)
        shared = self._memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        summed: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(shared, tensor, "sum", self._name)
        return summed


class PeerReduce(OneShotReduce):
    """`OneShotReduce` whose `add` is one kernel, `exchange_add`.

    Args:
        collectives, hidden_size, dtype: As there.
        timeout_s: How long `add` waits for a rank.
        lost: See `Boxes.lost`.

    Raises:
        RuntimeError: This machine shares no memory between processes.
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
        """Try sums out, see `sums_agree`. Every rank calls it, and none is waited for long: what runs in it was compiled before."""
        self._lost.fill_(1)  # nobody is waited for while others compile
        for rows in TRIALS:
            zeros = torch.zeros(rows, self._width, dtype=self._dtype, device=self._group.device)
            self.add(zeros, zeros, zeros[0], 1.0)
        self._boxes = self._emptied(min(self._timeout_s, TRIAL_WAIT_S))
        agrees = sums_agree(self, self._group, self._width, self._dtype, self._group.device)
        self._boxes = self._emptied(self._timeout_s)
        return agrees

    def _emptied(self, timeout_s: float) -> Boxes:
        """Return boxes with nothing in them, on every rank; what was sent before has arrived."""
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
    ) -> Stream:
        """See `Reduce.add`."""
        rows, width = residual.shape
        if not can_exchange(rows, width, self._boxes):
            return super().add(parts, residual, norm_weight, eps, bias=bias, out=out)
        return exchange_add(parts, residual, norm_weight, eps, self._boxes, bias=bias, out=out)


class PeerCollectives:
    """`Collectives` that pass small messages of integers through the other ranks' memory, and the rest through a group.

    Args:
        group: Of all ranks.
        timeout_s: How long a message is waited for. What does not come is 0 in a broadcast, which addresses nothing but what is there, and
            -1 in a gather, which is no token; and a rank that something did not come to gives rank 0 nothing else from then on.
        lost: See `Mail.lost`.

    Raises:
        RuntimeError: This machine shares no memory between processes.
    """

    def __init__(self, group: TorchCollectives, timeout_s: float, lost: torch.Tensor) -> None:
        self._group = group
        self._lost = lost
        self.rank, self.size = group.rank, group.size
        self._timeout_s = timeout_s
        self._boxes = [_shared(group, box_shape(group.size), torch.int64) for _ in range(2)]
        self._down, self._up = self._emptied(timeout_s)

    def proves_itself(self) -> bool:
        """Try messages out, see `messages_arrive`; as `PeerReduce.proves_itself`."""
        self._lost.fill_(1)  # nobody is waited for while others compile
        for words in MESSAGES:
            message = torch.zeros(words, dtype=torch.int32, device=self._group.device)
            self.broadcast(message)
            self.gather(message)
        self._down, self._up = self._emptied(min(self._timeout_s, TRIAL_WAIT_S))
        arrive = messages_arrive(self, self._group, self._group.device)
        self._down, self._up = self._emptied(self._timeout_s)
        return arrive

    def _emptied(self, timeout_s: float) -> tuple[Mail, Mail]:
        """Return mail with nothing on its way, on every rank."""
        _agreed(True, self._group.device)
        down, up = (Mail.of(self.rank, boxes, _looks(timeout_s), self._lost) for boxes in self._boxes)
        _agreed(True, self._group.device)
        return down, up

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Collectives.all_reduce`."""
        return self._group.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """See `Collectives.broadcast`."""
        if not _is_small(tensor):
            self._group.broadcast(tensor)
        elif self.rank == 0:
            send_words(tensor.view(-1).view(torch.int32), self._down, range(1, self.size), missing=0)
        else:
            receive_words(tensor.view(1, -1).view(torch.int32), self._down, range(1), missing=0)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives.gather`."""
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
        """See `Collectives.lost`."""
        return bool(self._lost.item())

    def close(self) -> None:
        """See `Collectives.close`."""
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
    """Return the fastest operations and sums that all ranks can take part in; every rank calls it, with the same arguments.

    Args:
        group: Of all ranks.
        hidden_size, dtype: Of the rows.
        kind: What was asked for.
        timeout_s: How long a rank is waited for.
        one_host: Whether all ranks run on one machine.
    """
    device = group.device
    if device.type != "cuda" or kind is ReduceKind.GROUP or not one_host or dtype not in PEER_DTYPES:
        return group, GroupReduce(group)
    made: tuple[Collectives, Reduce] | None = None
    if _agreed(reaches_all(device, group.rank, group.size), device):
        try:
            made = _proven(group, hidden_size, dtype, timeout_s) if kind is ReduceKind.AUTO else None
            made = made or (group, OneShotReduce(group, hidden_size, dtype))
        except RuntimeError as error:  # a driver or a sandbox that shares no memory between processes
            _log.warning("no symmetric memory; NCCL adds up", error=str(error).splitlines()[0])
    if _agreed(made is not None, device) and made is not None:
        messages, sums = made
        _log.info(
            "ranks reach each other's memory",
            ranks=group.size,
            sums=type(sums).__name__,
            messages=type(messages).__name__,
        )
        return made
    return group, GroupReduce(group)


def _proven(
    group: TorchCollectives, hidden_size: int, dtype: torch.dtype, timeout_s: float
) -> tuple[Collectives, Reduce] | None:
    """Return messages and sums through peer memory if a trial of both succeeds."""
    lost = torch.zeros(1, dtype=torch.int32, device=group.device)
    messages = PeerCollectives(group, timeout_s, lost)
    sums = PeerReduce(group, hidden_size, dtype, timeout_s, lost)
    if messages.proves_itself() and sums.proves_itself():
        return messages, sums
    _log.error(
        "messages or sums through peer memory came out wrong in a trial; NCCL and one shot take their place"
    )
    return None


def reaches_all(device: torch.device, rank: int, size: int) -> bool:
    """Whether this rank's GPU reaches the memory of the others', which are consecutive: rank r's is as far behind rank 0's as r.

    A process that sees its own GPU alone cannot tell, and says no.
    """
    index = device.index or 0
    first = index - rank
    seen = torch.cuda.device_count()
    if first < 0 or first + size > seen:
        _log.warning(
            "not every rank's GPU is visible to this rank; NCCL adds up",
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
    """Make a tensor on every rank that all can write to; returns them by rank."""
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
    """Whether every rank is able; what each has put into its own memory before is there when this returns."""
    flag = torch.tensor([int(able)], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
