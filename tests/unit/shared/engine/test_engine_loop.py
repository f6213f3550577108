"""The engine thread: it steps while there is work, otherwise sleeps, survives failing steps, and stops."""

from __future__ import annotations

import threading
import time

from outrider.shared.engine.loop import EngineThread


class Counter:
    """An engine with work for a given number of steps."""

    def __init__(self) -> None:
        self.left = 0
        self.steps = 0
        self.failures: list[Exception] = []
        self.fail = False
        self.due: float | None = None
        self.idle = threading.Event()

    def has_work(self) -> bool:
        if self.due is not None and time.monotonic() >= self.due:
            self.due = None
            self.left += 1
        if not self.left:
            self.idle.set()
        return self.left > 0

    def step(self) -> None:
        self.left -= 1
        self.steps += 1
        if self.fail:
            raise RuntimeError("broken")

    def next_wakeup(self) -> float | None:
        return self.due

    def step_failed(self, error: Exception) -> None:
        self.failures.append(error)


def give(engine: Counter, thread: EngineThread, steps: int) -> None:
    engine.idle.clear()
    engine.left = steps
    thread.wake()
    assert engine.idle.wait(10)


def test_the_engine_works_sleeps_and_survives_failures() -> None:
    engine = Counter()
    started = []
    thread = EngineThread(engine, on_start=lambda: started.append(threading.current_thread().name))
    thread.start()
    give(engine, thread, 100)
    assert engine.steps == 100
    engine.fail = True
    give(engine, thread, 3)
    assert [str(error) for error in engine.failures] == ["broken"] * 3
    engine.fail = False
    give(engine, thread, 5)
    assert engine.steps == 108
    assert started == ["engine"]
    thread.stop()


def test_the_engine_wakes_by_itself_when_work_is_due() -> None:
    engine = Counter()
    engine.due = time.monotonic() + 0.05
    thread = EngineThread(engine)
    thread.start()
    deadline = time.monotonic() + 10
    while engine.steps == 0 and time.monotonic() < deadline:
        engine.idle.wait(0.01)
    assert engine.steps == 1
    thread.stop()


def test_a_stop_is_never_missed() -> None:
    for _ in range(300):
        thread = EngineThread(Counter())
        thread.start()
        thread.stop(timeout_s=5)
