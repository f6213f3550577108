"""The times of the stages of a start."""

from __future__ import annotations

import pytest

from outrider.services.target.startup import stage_times
from outrider.services.target.startup.stage_times import StageTimes


def test_each_stage_counts_from_the_end_of_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stage_times.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stage_times, "process_age_s", lambda: 4.0)
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(stage_times._log, "info", lambda _text, **seconds: logged.append(seconds))
    times = StageTimes()
    for stage, seconds in (("model", 2.0), ("kernels", 1.5), ("model", 0.25)):
        now[0] += seconds
        times.done(stage)
    times.log()
    assert logged == [{"imports_s": 4.0, "model_s": 2.25, "kernels_s": 1.5}]
