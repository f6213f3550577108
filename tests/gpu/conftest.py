"""Makes the cases of tests/kernels importable, and reports where texts of 16-bit models differed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        str(value)
        for report in terminalreporter.stats.get("passed", [])
        for name, value in getattr(report, "user_properties", ())
        if name == "near-tie"
    ]
    if lines:
        terminalreporter.section("texts of 16-bit models that differ, at near-ties")
        for line in lines:
            terminalreporter.write_line(line)
