"""A step that does not end makes the target not ready, and later ends the process."""

from __future__ import annotations

import asyncio
import threading

from outrider.services.target.api.hang_watch import follow_progress
from outrider.shared.base.errors import UnavailableError
from outrider.shared.engine.loop import EngineThread
from outrider.shared.engine.progress import StepClock

WAIT_S = 20


class Hanging:
    """An engine whose steps last until they are released."""

    def __init__(self) -> None:
        self.work = True
        self.release = threading.Event()
        self.stepping = threading.Event()

    def has_work(self) -> bool:
        return self.work

    def step(self) -> None:
        self.stepping.set()
        self.release.wait(WAIT_S)
        self.work = False

    def next_wakeup(self) -> float | None:
        return None

    def step_failed(self, error: Exception) -> None:
        raise AssertionError(error)


def test_a_step_that_does_not_end_is_noticed() -> None:
    async def scenario() -> None:
        engine, states = Hanging(), asyncio.Queue[bool]()
        thread = EngineThread(engine)
        thread.start()
        assert engine.stepping.wait(WAIT_S)
        watch = asyncio.create_task(follow_progress(thread.clock, states.put, 0.05, lambda _error: None))
        async with asyncio.timeout(WAIT_S):
            assert await states.get() is False
        watch.cancel()
        engine.release.set()
        thread.stop()
        assert (thread.clock.steps, thread.clock.running_s()) == (1, 0.0)

    asyncio.run(scenario())


class ScriptedClock(StepClock):
    """Reports given step times, the last one again and again."""

    def __init__(self, *times: float) -> None:
        super().__init__()
        self._times = list(times)

    def running_s(self) -> float:
        return self._times.pop(0) if len(self._times) > 1 else self._times[0]


def test_an_engine_that_recovers_is_ready_again_and_one_that_does_not_ends() -> None:
    states: list[bool] = []
    ends: list[UnavailableError] = []

    async def set_serving(serving: bool) -> None:
        states.append(serving)

    async def scenario() -> None:
        clock = ScriptedClock(0.0, 0.05, 0.02, 0.0, 0.05, 0.09, 0.13)
        async with asyncio.timeout(WAIT_S):
            await follow_progress(clock, set_serving, 0.04, ends.append)

    asyncio.run(scenario())
    assert states == [False, True, False]
    assert len(ends) == 1
