"""The target's periodic line: rates between two snapshots, and nothing if nothing happened."""

from __future__ import annotations

from dataclasses import replace

from outrider.services.target.engine.engine_stats import EngineStats
from outrider.services.target.engine.status_line import StatusLine
from outrider.services.target.policy.speculation_stats import SpeculationStats
from outrider.services.target.policy.verdict import AutoVerdict
from outrider.shared.spec.drafter import DrafterState

IDLE = EngineStats(
    running=0,
    waiting=0,
    waiting_prompt_tokens=0,
    pages_total=100,
    pages_free=100,
    pages_held=0,
    draft_state=DrafterState.ON,
    generated_tokens=0,
    rounds=0,
    speculation=SpeculationStats(),
    speedup_estimate=None,
    verdict=AutoVerdict(),
    looks_lost_s=0.0,
)


def test_the_line_has_rates_of_the_interval() -> None:
    line = StatusLine()
    line.fields(IDLE, 0.0)
    drafted = SpeculationStats()
    for _ in range(10):
        drafted.record(8, 2, 0)
    busy = replace(
        IDLE, running=3, waiting=2, pages_held=25, generated_tokens=500, rounds=9, speculation=drafted
    )
    assert line.fields(busy, 10.0) == {
        "running": 3,
        "waiting": 2,
        "tokens_per_s": 50.0,
        "accept_length": 3.0,
        "kv_usage": 0.25,
        "speculation": "on",
        "auto": "idle",
    }
    again = line.fields(replace(busy, generated_tokens=600), 20.0)
    assert again is not None
    assert again["tokens_per_s"] == 10.0
    assert "accept_length" not in again


def test_an_idle_target_logs_nothing() -> None:
    line = StatusLine()
    assert line.fields(IDLE, 0.0) is None
    assert line.fields(IDLE, 10.0) is None
