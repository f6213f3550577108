"""The graph cache: runs eagerly without CUDA, keeps start-up graphs and a bounded number of other graphs."""

from __future__ import annotations

import torch
from support.engine.played_graphs import BoundedGraphs

from outrider.shared.engine.graphs import RECORD_AFTER, RECORD_ANYWAY_AFTER, WARM_UP_RUNS, GraphCache


def test_without_cuda_functions_run_eagerly_each_time() -> None:
    cache = GraphCache("cpu")
    numbers = torch.zeros(2)

    def record() -> torch.Tensor:
        numbers.add_(1)
        return numbers.clone()

    cache.capture("key", record)
    assert numbers.tolist() == [0, 0], "there are no warm-up runs, because nothing is recorded"
    assert cache.run("key", record).tolist() == [1, 1]
    assert cache.run("key", record).tolist() == [2, 2]
    assert cache.holds("key")
    assert cache.holds("another")
    assert (cache.keys, cache.memory_bytes, cache.enabled) == ((), 0, False)
    cache.clear()


def test_the_number_of_graphs_recorded_after_start_up_is_bounded() -> None:
    graphs = BoundedGraphs(max_late_graphs=2)
    with graphs.keeping():
        for key in ("first", "second", "third"):
            graphs.capture(key, list)
    for key in "abab":
        graphs.run(key, list)
    assert graphs.observer.gone == []
    graphs.run("a", list)
    graphs.run("c", list)
    assert graphs.keys == ("first", "second", "third", "a", "c"), "b was least recently used"
    assert graphs.observer.gone == [5]
    assert [graphs.replays(key) for key in "abc"] == [True, False, True]
    for number in range(1000):
        graphs.run(number, list)
    assert len(graphs.keys) == 5
    assert graphs.keys[-2:] == (998, 999)


def test_no_graph_is_dropped_while_there_is_room() -> None:
    graphs = BoundedGraphs(max_late_graphs=6)
    with graphs.keeping():
        pass
    for key in range(6):
        graphs.run(key, list)
    assert graphs.keys == tuple(range(6))
    assert graphs.observer.gone == []
    graphs.run(6, list)
    assert graphs.keys == tuple(range(1, 7))


def test_no_graph_is_dropped_before_start_up_is_over() -> None:
    graphs = BoundedGraphs(max_late_graphs=2)
    for key in range(10):
        graphs.run(key, list)
    assert len(graphs.keys) == 10


def test_a_key_that_is_new_after_start_up_runs_eagerly_until_a_recording_pays_off() -> None:
    graphs = BoundedGraphs(max_late_graphs=2)
    assert graphs.due("early"), "until start-up is over, every key is recorded"
    with graphs.keeping():
        graphs.capture("start", list)
    assert graphs.due("start")
    assert [graphs.due("late") for _ in range(RECORD_AFTER + 2)] == [False] * RECORD_AFTER + [True, True]
    graphs.capture("late", list)
    assert graphs.due("late")
    disabled = GraphCache("cpu", enabled=False)
    with disabled.keeping():
        pass
    assert disabled.due("anything")


def test_a_dropped_graph_is_recorded_again_when_its_key_comes_up() -> None:
    graphs = BoundedGraphs(max_late_graphs=9)
    with graphs.keeping():
        graphs.capture("a", list)
        graphs.capture("b", list)
    pool = graphs.pool
    graphs.drop(["a", "unknown"])
    assert graphs.keys == ("b",)
    assert graphs.pool is pool
    with graphs.keeping():
        graphs.capture("a", list)
    assert graphs.captured == ["a", "b", "a"]
    graphs.drop(["a", "b"])
    assert graphs.pool is None, "torch accepts no graph into a pool whose last graph is gone"


def test_keys_that_are_counted_together_become_due_together() -> None:
    """Before start-up has ended, too."""
    graphs = BoundedGraphs(max_late_graphs=2)
    answers = [graphs.due(("size", width), counted_as="size") for width in range(RECORD_AFTER + 1)]
    assert answers == [False] * RECORD_AFTER + [True]
    graphs.expect("another")
    assert graphs.due(("another", 1), counted_as="another")


def test_a_key_whose_recording_takes_long_is_not_recorded_while_requests_wait() -> None:
    graphs = BoundedGraphs(max_late_graphs=9)
    with graphs.keeping():
        pass

    def meet(key: str) -> bool:
        due = False
        for _ in range(RECORD_AFTER + 1):
            due = graphs.due(key)
            graphs.run_eagerly(key, list)
        return due

    assert meet("quick")
    assert graphs.provisional_runs == RECORD_AFTER + 1, "later runs will replay a graph"
    graphs.most_late_s = 0.0
    assert not meet("slow")
    assert graphs.provisional_runs == RECORD_AFTER + 1, "later runs will take as long"
    for _ in range(RECORD_AFTER + 1, RECORD_ANYWAY_AFTER):
        assert not graphs.due("slow")
    assert graphs.due("slow"), "so many runs have cost more time than the recording"
    with graphs.keeping():
        graphs.capture("slow", list)
    assert graphs.replays("slow"), "while no request waits, any key can be recorded"


def test_work_that_has_run_often_needs_no_further_run_before_its_recording() -> None:
    graphs = BoundedGraphs(max_late_graphs=9)
    with graphs.keeping():
        graphs.capture("start", list)
    for _ in range(RECORD_AFTER + 1):
        graphs.due("late")
        graphs.run_eagerly("late", list)
    graphs.capture("late", list)
    graphs.capture("never run", list)
    assert graphs.warm_up_runs == [WARM_UP_RUNS, 0, WARM_UP_RUNS]


def test_a_disabled_cache_measures_nothing() -> None:
    graphs = GraphCache("cpu")
    assert graphs.run_eagerly("key", lambda: 3) == 3
    assert graphs.provisional_runs == 0
