"""A recorded CUDA graph, work in several parts, and the observer of recordings and replays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")

Parts = Generator[None, None, Result]
"""Work that pauses after each part except the last. Its tensors stay alive until the last part is done."""


def single_part(function: Callable[[], Result]) -> Parts[Result]:
    """Return the work of a function as a single part."""
    yield from ()
    return function()


def next_part(work: Parts[Result]) -> tuple[bool, Result | None]:
    """Do the next part. Return whether it was the last part, and then also the result of the work."""
    try:
        next(work)
    except StopIteration as end:
        return True, end.value
    return False, None


def finish_parts(work: Parts[Result]) -> Result | None:
    """Do all parts that are left, and return the result of the work."""
    while True:
        ended, result = next_part(work)
        if ended:
            return result


@dataclass(frozen=True, slots=True)
class _DeviceBytes:
    """Bytes of device memory that another object owns. `torch.as_tensor` makes a tensor on them."""

    address: int
    count: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.count,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def until_next_run(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values for the result of a function that may be recorded.

    In a capture, the returned tensor uses the memory of `tensor`, but does not keep this memory allocated.
    Later graphs of the same cache can therefore use the memory, too, and the result is valid until the next
    run of any of these graphs. Otherwise, each graph would keep its own memory for its result, for example
    for the logits of a round. Outside a capture, the function returns `tensor` itself.
    """
    if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return tensor
    storage = tensor.untyped_storage()
    memory = torch.as_tensor(_DeviceBytes(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    return memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def end_broken_capture(pool: Any) -> None:
    """Restore torch's state after the capture of a CUDA graph with this memory pool has failed.

    At the error, torch stops the capture, but leaves its allocator and random generator in capture mode.
    """
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # some torch versions have already ended the allocation
        torch._C._cuda_endAllocateToPool(device, pool)
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())


class GraphObserver(Protocol):
    """Interface of an observer that is called whenever a CUDA graph is recorded, replayed or dropped.

    With tensor parallelism, the observer uses these calls to make the other ranks do the same with their
    graphs.
    """

    def recording(self, graph: int) -> None:
        """Called just before work is captured as graph number `graph`."""
        ...

    def recorded(self, graph: int) -> None:
        """Called when the capture is complete."""
        ...

    def replaying(self, graph: int) -> None:
        """Called just before the graph is launched."""
        ...

    def dropped(self, graph: int) -> None:
        """Called when one graph is dropped."""
        ...

    def forgotten(self) -> None:
        """Called when all graphs are dropped."""
        ...


@dataclass(frozen=True, slots=True)
class GraphPart:
    """One CUDA graph, and its number for the observer."""

    number: int
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class RecordedGraph:
    """One recording: the CUDA graphs of its parts, their memory pool, and the result of the recorded work.

    Most recordings have a single part.
    """

    parts: Sequence[GraphPart]
    pool: Any
    result: Any
