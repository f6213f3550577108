"""When graphs are recorded: first graphs at once, further graphs while idle, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from outrider.services.target.engine import recorder
from outrider.services.target.engine.recorder import IDLE_S, GraphRecorder, Recording, RecordingList
from outrider.shared.engine.graphs import GraphCache


class World:
    """A recorder with a clock, and graphs that are only names."""

    def __init__(self, first: str = "", further: str = "") -> None:
        self.now = 100.0
        self.made: list[str] = []
        self.first, self.further = first, further
        self.recorder = GraphRecorder(GraphCache("cpu"), clock=lambda: self.now)

    def listed(self) -> RecordingList:
        return RecordingList(
            [self._one(name) for name in self.first], [self._one(name) for name in self.further]
        )

    def follow(self, is_compiled: Callable[[Callable[[], None]], bool] | None = None) -> World:
        if is_compiled is None:
            self.recorder.follow(self.listed)
        else:
            self.recorder.follow(self.listed, is_compiled)
        return self

    def run(self) -> str:
        """Record while graphs are due; return the names of the new ones."""
        before = len(self.made)
        while self.recorder.is_due():
            self.recorder.record_next()
        return "".join(self.made[before:])

    def _one(self, name: str) -> Recording:
        return name, lambda: self.made.append(name)


def test_nothing_is_due_before_graphs_are_listed() -> None:
    world = World("a", "b")
    assert not world.recorder.planned
    assert not world.recorder.is_due()
    assert world.recorder.next_due is None


def test_first_graphs_are_recorded_at_once_and_further_ones_when_the_engine_is_idle() -> None:
    world = World("ab", "cd").follow()
    world.recorder.live()
    assert world.run() == "ab"
    assert world.recorder.next_due == world.now + IDLE_S
    world.now += IDLE_S / 2
    assert not world.recorder.is_due()
    world.recorder.live()
    world.now += IDLE_S / 2
    assert not world.recorder.is_due(), "a request starts the wait again"
    world.now += IDLE_S / 2
    assert world.run() == "cd"
    assert world.recorder.next_due is None


def test_each_call_records_one_graph() -> None:
    world = World("a", "bc").follow()
    for name in "abc":
        assert world.recorder.record_next() == name
        assert world.made[-1] == name
    assert world.recorder.record_next() == ""
    assert world.made == ["a", "b", "c"]


def test_a_caller_waits_for_the_first_graphs_only() -> None:
    world = World("ab", "c").follow()
    asked = world.recorder.ask()
    world.recorder.hear()
    world.recorder.record_next()
    assert not asked.is_set()
    world.recorder.record_next()
    assert asked.is_set()
    late = world.recorder.ask()
    assert world.recorder.is_due(), "nothing is left to wait for"
    world.recorder.record_next()
    assert not late.is_set(), "the draft may have changed since the last check"
    world.recorder.hear()
    world.recorder.record_next()
    assert late.is_set()


def test_a_caller_that_waits_for_all_graphs_does_not_wait_for_idle_time() -> None:
    world = World("a", "bc").follow()
    world.recorder.live()
    asked = world.recorder.ask(for_all=True)
    world.recorder.hear()
    while not asked.is_set():
        assert world.recorder.is_due()
        world.recorder.record_next()
    assert world.made == ["a", "b", "c"]


def test_a_new_draft_starts_the_list_again() -> None:
    world = World("a", "bc").follow()
    world.recorder.record_next()
    world.recorder.record_next()
    world.first = "x"
    world.recorder.renew()
    assert (world.recorder.num_first, world.recorder.num_further) == (1, 2)
    assert world.run() == "xbc"


def test_graphs_whose_kernels_are_being_compiled_come_later() -> None:
    world, compiled = World("", "abc"), {"b", "c"}

    def is_compiled(record: Callable[[], None]) -> bool:
        before = len(world.made)
        record()
        return world.made.pop(before) in compiled

    world.follow(is_compiled)
    assert world.run() == "bc"
    assert world.recorder.next_due == world.now + IDLE_S, "an idle engine must not busy-poll the compiler"
    world.now += IDLE_S
    compiled.add("a")
    assert world.run() == "a"


def test_first_graphs_do_not_wait_for_compilers() -> None:
    world = World("a").follow(lambda _record: False)
    assert world.run() == "a"


def test_recorded_graphs_are_permanent_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World("a", "b")
    kept: list[bool] = []
    graphs = world.recorder._graphs
    world.recorder.follow(
        lambda: RecordingList([("a", lambda: kept.append(graphs._keeping))], world.listed().further)
    )
    with caplog.at_level(logging.INFO):
        world.run()
    assert kept == [True]
    assert [record.message.split()[0] for record in caplog.records] == ["first", "all"]


def test_what_recording_has_made_is_exempted_from_garbage_collections_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full collection would otherwise visit the graphs, and delay all streams for that time."""
    world = World("a", "bc").follow()
    monkeypatch.setattr(recorder, "freeze_objects", lambda: world.made.append("frozen"))
    world.run()
    world.now += IDLE_S
    world.run()
    assert world.made == ["a", "b", "c", "frozen"]
