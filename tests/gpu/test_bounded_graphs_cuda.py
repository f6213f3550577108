"""Tests of graphs that come and go in one memory pool: kept graphs still work, and memory stops growing."""

from __future__ import annotations

import pytest
import torch

from outrider.shared.engine.graphs import GraphCache
from outrider.shared.engine.recorded_graph import until_next_run

pytestmark = pytest.mark.gpu
SIZE = 1 << 20


def test_graphs_that_are_dropped_leave_the_others_and_their_memory() -> None:
    cache = GraphCache("cuda", max_late_graphs=3)
    numbers = torch.ones(SIZE, device="cuda")

    def total(factor: int) -> int:
        """Return the sum of all numbers times a factor, computed by a graph of its own."""
        return int(cache.run(factor, lambda: (numbers * factor).sum()))

    with cache.keeping():
        for factor in (2, 3):
            cache.capture(factor, lambda factor=factor: (numbers * factor).sum())  # type: ignore[misc]
    reserved = 0
    for factor in range(4, 44):
        assert total(factor) == factor * SIZE
        assert [total(kept) for kept in (2, 3)] == [2 * SIZE, 3 * SIZE]
        if factor == 10:
            reserved = torch.cuda.memory_reserved()
    assert cache.keys == (2, 3, 41, 42, 43)
    assert torch.cuda.memory_reserved() == reserved
    numbers.mul_(2)
    assert total(2) == 4 * SIZE, "the graph must be replayed, not its result returned"


def test_graphs_share_the_memory_of_results_that_end_with_the_next_run() -> None:
    cache = GraphCache("cuda")
    numbers = torch.arange(16 * SIZE, device="cuda", dtype=torch.bfloat16).view(SIZE, 16)

    def rows(factor: int) -> torch.Tensor:
        """Compute 32 MiB, and return a part of them."""
        return until_next_run((numbers * factor).t()[3:])

    for factor in range(2, 10):
        cache.capture(factor, lambda factor=factor: rows(factor))  # type: ignore[misc]
        if factor == 2:
            reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == reserved
    numbers.add_(1)
    for factor in (2, 9, 2):
        found = cache.run(factor, lambda: numbers)
        assert torch.equal(found, (numbers * factor).t()[3:])
    expected = numbers * 3
    outside = until_next_run(expected)
    assert outside is expected, "without a capture, the result keeps its memory"


def test_a_pool_that_lost_its_last_graph_takes_none() -> None:
    cache = GraphCache("cuda", max_late_graphs=1)
    numbers = torch.ones(SIZE, device="cuda")
    with cache.keeping():
        cache.capture("kept", lambda: numbers.sum())
    assert cache.run("asks", lambda: int(numbers.sum().item())) == SIZE, (
        "the function runs eagerly, and later graphs use another pool"
    )
    for factor in range(3, 9):
        assert int(cache.run(factor, lambda factor=factor: (numbers * factor).sum())) == factor * SIZE  # type: ignore[misc]
    cache.drop(cache.keys)
    assert not cache.keys
    with cache.keeping():
        assert int(cache.run("kept", lambda: numbers.sum())) == SIZE
    assert list(cache.keys) == ["kept"]


def test_work_that_has_run_often_is_captured_without_a_further_run() -> None:
    """The products need a workspace, which the eager runs and the first capture have allocated."""
    cache = GraphCache("cuda")
    rows = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    runs: list[str] = []

    def product(name: str) -> torch.Tensor:
        runs.append(name)
        return (rows @ weight).softmax(-1)

    with cache.keeping():
        cache.capture("start", lambda: product("start"))
    expected = product("alone").clone()
    while not cache.due("late"):
        cache.run_eagerly("late", lambda: product("eager"))
    runs.clear()
    cache.capture("late", lambda: product("captured"))
    assert runs == ["captured"]
    rows.mul_(1)
    assert torch.equal(cache.run("late", lambda: product("never")), expected)
    assert runs == ["captured"]
