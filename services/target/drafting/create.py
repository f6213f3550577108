"""Makes the source of a drafter's trees."""

from __future__ import annotations

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.drafting.draft_source import DraftSource
from outrider.services.target.drafting.exchange_source import ExchangeSource
from outrider.services.target.drafting.host_source import HostSource
from outrider.services.target.drafting.planner import DraftPlanner
from outrider.services.target.drafting.resident_source import ResidentSource
from outrider.services.target.model.model_runner import ModelRunner
from outrider.services.target.model.step_runner import StepRunner
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.shared.spec.drafter import Drafter


def make_draft_source(
    drafter: Drafter,
    sessions: DraftSessions,
    planner: DraftPlanner,
    scheduler: Scheduler,
    controller: SpeculationController,
    runner: ModelRunner,
    step_runner: StepRunner,
    *,
    on_device: bool,
) -> DraftSource:
    """Return the draft source that supplies the trees of a drafter to the decode loop.

    Args:
        drafter: Proposes trees.
        sessions: The drafter's sessions.
        planner: Chooses the tree shape of each sequence.
        scheduler: Lists the sequences that decode.
        controller: Limits the wait for trees that come through the host.
        runner: The target's model and KV pool.
        step_runner: Owns the slots and the packed trees.
        on_device: False to request all trees through the host.
    """
    drafting, slots = (drafter.on_device, drafter.slots) if on_device else (None, None)
    if drafting is not None:
        sessions.sends_stored = False
        return ResidentSource(drafting, runner, step_runner, planner)
    host = HostSource(drafter, sessions, planner, scheduler, controller, step_runner)
    if slots is None:
        return host
    return ExchangeSource(slots, host, step_runner, runner.pool, planner)
