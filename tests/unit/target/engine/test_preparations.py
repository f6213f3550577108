"""Preparations of the recorder: their order, their pieces, and when callers learn that they are done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.services.target.engine.recorder import IDLE_S, GraphRecorder, RecordingList
from outrider.shared.engine.graphs import GraphCache


class Work:
    """A recorder whose preparations and graphs note their names."""

    def __init__(self) -> None:
        self.now = 100.0
        self.done: list[str] = []
        self.recorder = GraphRecorder(GraphCache("cpu"), clock=lambda: self.now)

    def pieces(self, *names: str) -> Iterator[None]:
        for name in names:
            self.done.append(name)
            yield

    def follow(self, first: str, further: str) -> None:
        lists = [
            [(name, lambda name=name: self.done.append(name)) for name in names] for names in (first, further)
        ]
        self.recorder.follow(lambda: RecordingList(*lists))  # type: ignore[arg-type]

    def step(self) -> list[str]:
        """Do one piece, and return what was done."""
        before = len(self.done)
        assert self.recorder.is_due()
        self.recorder.record_next()
        return self.done[before:]


def test_preparations_come_between_the_first_and_the_further_graphs() -> None:
    work = Work()
    work.recorder.prepare(work.pieces("a", "b"))
    work.recorder.prepare(work.pieces("c"))
    work.follow("1", "2")
    assert work.step() == ["1"]
    rest = [work.step() for _ in range(6)]
    assert rest == [["a"], ["b"], [], ["c"], [], ["2"]], (
        "the end of an iterator is found by the step after its last piece"
    )
    assert not work.recorder.is_due()


def test_preparations_wait_until_the_engine_is_idle() -> None:
    work = Work()
    work.recorder.prepare(work.pieces("a"))
    work.recorder.live()
    assert work.recorder.next_due == work.now + IDLE_S
    assert not work.recorder.is_due()
    work.now += IDLE_S
    assert work.step() == ["a"]


def test_callers_who_ask_for_the_first_graphs_do_not_wait_for_preparations() -> None:
    work = Work()
    work.follow("1", "")
    work.recorder.prepare(work.pieces("a"))
    first, everything = work.recorder.ask(), work.recorder.ask(for_all=True)
    work.recorder.hear()
    assert work.step() == ["1"]
    assert first.is_set()
    assert work.step() == ["a"]
    assert not everything.is_set()
    work.step()
    assert everything.is_set()
    assert not work.recorder.is_due()


def test_a_preparation_that_fails_does_not_stop_the_others() -> None:
    work = Work()

    def failing() -> Iterator[None]:
        yield
        raise RuntimeError("no memory")

    work.recorder.prepare(failing())
    work.recorder.prepare(work.pieces("a"))
    work.step()
    with pytest.raises(RuntimeError, match="no memory"):
        work.step()
    assert [work.step() for _ in range(2)] == [[], ["a"]]
