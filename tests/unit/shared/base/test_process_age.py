"""The age of a process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from outrider.shared.base import process_age
from outrider.shared.base.process_age import process_age_s


def test_the_age_of_this_process_grows() -> None:
    age = process_age_s()
    assert age is not None
    assert 0.0 < age < time.clock_gettime(time.CLOCK_BOOTTIME)
    later = process_age_s()
    assert later is not None
    assert later >= age


def test_without_proc_there_is_no_age(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_age, "Path", lambda _path: tmp_path / "missing")
    assert process_age_s() is None
