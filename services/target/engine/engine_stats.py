"""The snapshot of a target's load, speculation and prefix cache that GetStats returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.services.target.policy.speculation_stats import SpeculationStats
from outrider.services.target.policy.verdict import AutoVerdict
from outrider.shared.kv.prefix_cache import PrefixStats
from outrider.shared.spec.drafter import DrafterState


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for GetStats. Other threads read it."""

    running: int
    waiting: int
    waiting_prompt_tokens: int
    pages_total: int
    pages_free: int
    pages_held: int
    draft_state: DrafterState
    generated_tokens: int
    rounds: int
    speculation: SpeculationStats
    speedup_estimate: float | None
    verdict: AutoVerdict
    looks_lost_s: float
    prefixes: PrefixStats = field(default_factory=PrefixStats)
