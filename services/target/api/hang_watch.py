"""Reports a target as not serving while its engine hangs, and ends it if the engine does not recover."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from outrider.shared.base.errors import UnavailableError
from outrider.shared.engine.progress import StepClock
from outrider.shared.obs.logging import get_logger

END_FACTOR = 3.0
"""The process ends after this multiple of the deadline."""
MAX_LOOK_S = 1.0
_log = get_logger("outrider.target.hang")


async def follow_progress(
    clock: StepClock,
    set_serving: Callable[[bool], Awaitable[None]],
    deadline_s: float,
    end: Callable[[UnavailableError], None],
) -> None:
    """Set the target's health status from the duration of the engine's current step, until cancelled.

    Args:
        clock: Returns the seconds since the start of the engine's current step.
        set_serving: Sets the health status.
        deadline_s: Seconds that a step may take. The engine counts as hung while a step takes longer.
        end: Function that ends the process, so that a supervisor restarts it. Called once a step has taken
            `END_FACTOR` times `deadline_s`.
    """
    hung = False
    while True:
        await asyncio.sleep(min(MAX_LOOK_S, deadline_s / 4))
        took_s = clock.running_s()
        if (took_s > deadline_s) is not hung:
            hung = not hung
            if hung:
                _log.error("the engine makes no progress; not serving", step_s=round(took_s, 1))
            else:
                _log.warning("the engine makes progress again")
            await set_serving(not hung)
        if took_s > END_FACTOR * deadline_s:
            end(UnavailableError(f"A step of the engine did not end within {took_s:.0f} s."))
            return
