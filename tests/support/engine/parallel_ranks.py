"""Ranks of a tensor-parallel decoder as threads of the test process, with real ranks' shares and sums."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from outrider.services.target.parallel.group import RankGroup
from outrider.shared.nn.open import checked_source, read_model_config
from outrider.shared.parallel.decoder import ShardedDecoder, build_rank
from outrider.shared.parallel.reduce import GroupReduce
from outrider.shared.parallel.shard import Shard

Result = TypeVar("Result")


class Meeting:
    """The barrier of one group of threads, and the tensors that the threads exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadCollectives:
    """The `Collectives` of one thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def _all(self, tensor: torch.Tensor) -> torch.Tensor:
        meeting = self._meeting
        meeting.slots[self.rank] = tensor.clone()
        meeting.barrier.wait()
        stacked = (
            torch.stack(meeting.slots)
            if len({slot.shape for slot in meeting.slots}) == 1
            else meeting.slots[0][None]
        )
        meeting.barrier.wait()
        return stacked

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._all(tensor).sum(0))

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._all(tensor)[0])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        stacked = self._all(tensor)
        return stacked if self.rank == 0 else None

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        pass


def load_ranks(path: Path, size: int) -> list[ShardedDecoder]:
    """Load every rank's share of a model folder in fp32."""
    meeting, config = Meeting(size), read_model_config(path)
    decoders = []
    for rank in range(size):
        collectives = ThreadCollectives(meeting, rank)
        shard = Shard.of(config, rank, size)
        with checked_source(path, config, torch.device("cpu"), torch.float32) as checkpoint:
            decoders.append(
                build_rank(ShardedDecoder, checkpoint, shard, collectives, GroupReduce(collectives))
            )
    return decoders


def on_all(decoders: list[ShardedDecoder], work: Callable[[ShardedDecoder], Result]) -> list[Result]:
    """Run `work` on all ranks concurrently, and return the results in the order of the ranks."""
    with ThreadPoolExecutor(len(decoders)) as threads:
        return [future.result() for future in [threads.submit(work, decoder) for decoder in decoders]]


def exit_codes(group: RankGroup) -> list[int | None]:
    """Return the exit codes of the ranks that this process started. The code of a running rank is None."""
    return [process.returncode for process in group._processes]
