"""Shows at the end of a run what tests of 16-bit models recorded: where texts differ, by which logits."""

from __future__ import annotations

import pytest


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
