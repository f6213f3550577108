"""Without CUDA a graph cache runs what it is given, every time."""

from __future__ import annotations

import torch

from outrider.shared.engine.graphs import GraphCache
from outrider.shared.spec.device import RoundState


def test_without_cuda_functions_run_each_time() -> None:
    cache = GraphCache("cpu")
    numbers = torch.zeros(2)

    def record() -> torch.Tensor:
        numbers.add_(1)
        return numbers.clone()

    cache.capture("key", record)
    assert numbers.tolist() == [0, 0], "there is nothing to record"
    assert cache.run("key", record).tolist() == [1, 1]
    assert cache.run("key", record).tolist() == [2, 2]
    assert cache.holds("key")
    assert cache.holds("another")
    assert (cache.keys, cache.memory_bytes, cache.enabled) == ((), 0, False)
    cache.clear()


def test_an_idle_state_has_roots_of_zero() -> None:
    state = RoundState.idle(3, 4, 8, torch.float32, "cpu")
    assert (state.bs, state.columns) == (3, 4)
    assert state.roots().tolist() == [0, 0, 0]
    state.tokens[1] = torch.tensor([7, 8, 9, 0])
    state.counts[1] = 3
    assert state.roots().tolist() == [0, 9, 0]
    assert state.features.shape == (3, 4, 8)
