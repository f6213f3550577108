"""Tests of peer memory with ranks that share a process.

Peer memory is used only if it passes its trial. A late rank yields no token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from support.engine.parallel_ranks import Meeting, ThreadCollectives

from outrider.shared.parallel import peer
from outrider.shared.parallel.peer import PeerCollectives, PeerReduce

torch.set_num_threads(1)
WIDTH = 600
Result = TypeVar("Result")


class PeerThreads:
    """Ranks as threads whose "GPUs" can access each other's memory. It replaces `peer`'s group and memory.

    Args:
        monkeypatch: The test's fixture.
        size: Number of ranks.
        memory: Maps a rank's own memory to the memory that the other ranks see.
        looks: Number of polls in a second of waiting.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        size: int,
        *,
        memory: Callable[[torch.Tensor], torch.Tensor] | None = None,
        looks: int = 20_000,
    ) -> None:
        self.size = size
        self._memory = memory or (lambda own: own)
        self._meeting, self._agreement = Meeting(size), Meeting(size)
        self._lock = threading.Lock()
        self._shared: dict[int, list[torch.Tensor]] = {}
        self._thread: Any = threading.local()
        monkeypatch.setattr(peer, "_shared", self._share)
        monkeypatch.setattr(peer, "_agreed", self._agree)
        monkeypatch.setattr(peer, "LOOKS_PER_SECOND", looks)

    def _share(self, _group: object, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        self._thread.calls += 1
        with self._lock:
            everyone = self._shared.setdefault(
                self._thread.calls, [torch.empty(shape, dtype=dtype) for _ in range(self.size)]
            )
        return [own if rank == self._thread.rank else self._memory(own) for rank, own in enumerate(everyone)]

    def _agree(self, able: bool, _device: torch.device) -> bool:
        return bool(ThreadCollectives(self._agreement, self._thread.rank)._all(torch.tensor([able])).all())

    def run(self, work: Callable[[Any], Result]) -> list[Result]:
        """Run `work` on every rank with its group. Return the results by rank."""

        def ranked(rank: int) -> Result:
            self._thread.rank, self._thread.calls = rank, 0
            group: Any = ThreadCollectives(self._meeting, rank)
            group.device, group.group = torch.device("cpu"), SimpleNamespace(group_name="")
            return work(group)

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(ranked, range(self.size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_passes_its_trial_is_used(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = PeerThreads(monkeypatch, size)
    for made in ranks.run(lambda group: peer._proven(group, WIDTH, dtype, 60.0)):
        assert made is not None
        messages, sums = made
        assert isinstance(messages, PeerCollectives)
        assert isinstance(sums, PeerReduce)
        assert not messages.lost()


def test_memory_that_takes_no_writes_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = PeerThreads(monkeypatch, 2, memory=torch.clone, looks=20)
    assert ranks.run(lambda group: peer._proven(group, WIDTH, torch.float32, 60.0)) == [None, None]


def test_a_rank_that_a_message_did_not_reach_gives_no_token_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
        messages = PeerCollectives(group, 60.0, torch.zeros(1, dtype=torch.int32))
        if group.rank == 1:
            messages._down = replace(messages._down, patience=1)
            inputs = torch.full((3,), 9, dtype=torch.int32)
            messages.broadcast(inputs)  # Rank 0 has not sent it.
            assert inputs.tolist() == [0, 0, 0]
        best = messages.gather(torch.tensor([[7, 5]], dtype=torch.int32))
        logits = messages.gather(torch.ones(1, 40_000))
        return best, logits, messages.lost()

    (best, logits, _), (_, _, lost) = PeerThreads(monkeypatch, 2).run(work)
    assert best is not None
    assert logits is not None
    assert best.tolist() == [[[7, 5]], [[-1, -1]]]
    assert not bool(logits[0].isnan().any())
    assert bool(logits[1].isnan().all())
    assert lost
