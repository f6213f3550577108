"""Work for idle times: its order, its pieces, and who is told about its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.services.target.engine.rerecording import Rerecording
from outrider.shared.engine.graphs import GraphCache


class Work:
    """A `Rerecording` whose work notes its pieces."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.rerecording = Rerecording(GraphCache("cpu"))
        self.rerecording.begin_later()

    def pieces(self, *names: str) -> Iterator[None]:
        for name in names:
            self.done.append(name)
            yield

    def follow(self, *names: str) -> None:
        self.rerecording.follow(lambda: [lambda name=name: self.done.append(name) for name in names])  # type: ignore[misc]

    def step(self) -> list[str]:
        """Do one piece, and return what was done."""
        before = len(self.done)
        assert self.rerecording.waiting
        self.rerecording.record_next()
        return self.done[before:]


def test_graphs_come_before_other_work_and_each_step_does_one_piece() -> None:
    work = Work()
    work.rerecording.later(work.pieces("a", "b"))
    work.rerecording.later(work.pieces("c"))
    assert work.step() == ["a"]
    work.follow("one", "two")
    work.rerecording.renew()
    assert [work.step() for _ in range(3)] == [["one"], ["two"], ["b"]]
    rest = [work.step() for _ in range(3)]
    assert rest == [[], ["c"], []], "the end of an iterator is found by the step after its last piece"
    assert not work.rerecording.waiting


def test_who_asks_for_the_graphs_does_not_wait_for_other_work() -> None:
    work = Work()
    work.follow("one")
    work.rerecording.renew()
    work.rerecording.later(work.pieces("a"))
    graphs, everything = work.rerecording.ask(), work.rerecording.ask(all_work=True)
    assert work.step() == ["one"]
    assert graphs.is_set()
    assert not everything.is_set()
    assert work.step() == ["a"]
    assert not everything.is_set()
    work.step()
    assert everything.is_set()
    assert not work.rerecording.waiting


def test_other_work_does_not_delay_the_start() -> None:
    work = Work()
    work.rerecording = Rerecording(GraphCache("cpu"))
    work.rerecording.later(work.pieces("a"))
    assert not work.rerecording.waiting
    work.follow("one")
    work.rerecording.renew()
    assert work.step() == ["one"]
    assert not work.rerecording.waiting
    work.rerecording.ask(all_work=True)
    assert work.step() == ["a"], "whoever asks for all work begins it"


def test_an_idle_engine_answers_at_once() -> None:
    work = Work()
    asked = work.rerecording.ask(all_work=True)
    assert work.step() == []
    assert asked.is_set()


def test_work_that_fails_does_not_stop_the_rest() -> None:
    work = Work()

    def failing() -> Iterator[None]:
        yield
        raise RuntimeError("no memory")

    work.rerecording.later(failing())
    work.rerecording.later(work.pieces("a"))
    work.step()
    with pytest.raises(RuntimeError, match="no memory"):
        work.step()
    assert [work.step() for _ in range(2)] == [[], ["a"]]
