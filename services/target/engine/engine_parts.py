"""The engine's parts that rounds through the host (`host_rounds`) and on the device (`device_loop`) share."""

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
    """The parts of one engine. Only the engine thread may use these parts.

    Attributes:
        drafter: Proposes trees.
        follower: Opens, closes and resyncs the drafter's sessions.
        scheduler: Owns the KV pages and decides which sequences run.
        delivery: Collects events for the clients and ends sequences.
        proposals: Requests trees from the drafter.
        controller: Chooses how much to draft.
        metrics: Counts rounds.
        poisoned: Called with a sequence whose logits are NaN or infinite. The function fails that sequence.
        forget: Called with every sequence that has ended.
        counter: Counts the engine's rounds.
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
