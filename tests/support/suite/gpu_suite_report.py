"""A pytest plugin that writes a JSON line at the start and the end of each test, for `gpu_suite.py`.

Load the plugin with ``-p support.suite.gpu_suite_report``. The lines survive if the run is interrupted. If
`GPU_SUITE_ONLY` names a file, only the tests listed in the file are run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

PRINTED = ("soak", "mps", "serving")
"""Words in the names of tests whose output is written to the log."""

# With pytest-xdist, only the controller process writes, because it receives the reports of all workers.
_log = "" if os.environ.get("PYTEST_XDIST_WORKER") else os.environ.get("GPU_SUITE_LOG", "")
_seconds: dict[str, float] = {}


def _write(**row: Any) -> None:
    if _log:
        with Path(_log).open("a") as file:
            file.write(json.dumps(row) + "\n")


def name_of(node_id: str) -> str:
    """Return a test's name without the group that pytest-xdist appends."""
    name, _, group = node_id.rpartition("@")
    return name if name and "]" not in group else node_id


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    listed = os.environ.get("GPU_SUITE_ONLY")
    if listed:
        wanted = set(Path(listed).read_text().split("\n"))
        left_out = [item for item in items if name_of(item.nodeid) not in wanted]
        items[:] = [item for item in items if name_of(item.nodeid) in wanted]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(event="start", test=name_of(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = name_of(report.nodeid)
    _seconds[test] = _seconds.get(test, 0.0) + report.duration
    result = {"test": test, "outcome": report.outcome, "seconds": round(_seconds[test], 2)}
    if report.failed:
        _write(event="end", **result, when=report.when, error=report.longreprtext[-6000:])
    elif report.when == "call" or report.skipped:
        ties = [value for name, value in report.user_properties if name == "near-tie"]
        printed = report.capstdout[-1500:] if any(word in test for word in PRINTED) else ""
        _write(event="end", **result, near_ties=ties, printed=printed)
    elif report.when == "teardown":
        _write(event="down", **result)
