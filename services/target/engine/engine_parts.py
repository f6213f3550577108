"""What the ways of taking rounds share: by way of the host (`host_rounds`), and on the device (`device_loop`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.services.target.drafting.draft_sessions import DraftSessions
from outrider.services.target.drafting.proposals import Proposals
from outrider.services.target.engine.output_processor import OutputProcessor
from outrider.services.target.engine.rounds import RoundCounter
from outrider.services.target.metrics import TargetMetrics
from outrider.services.target.policy.controller import SpeculationController
from outrider.services.target.scheduling.scheduler import Scheduler
from outrider.services.target.scheduling.sequence import Sequence
from outrider.shared.spec.drafter import Drafter


@dataclass(slots=True)
class EngineParts:
    """The parts of one engine. All belong to its thread.

    Attributes:
        drafter, follower, scheduler, delivery, proposals, controller: The engine's.
        metrics: What rounds are counted into.
        poisoned: Fails a sequence whose logits are not numbers.
        forget: Told of every sequence that ended.
        counter: Of the engine's rounds.
    """

    drafter: Drafter
    follower: DraftSessions
    scheduler: Scheduler
    delivery: OutputProcessor
    proposals: Proposals
    controller: SpeculationController
    metrics: TargetMetrics
    poisoned: Callable[[Sequence], None]
    forget: Callable[[Sequence], None]
    counter: RoundCounter
