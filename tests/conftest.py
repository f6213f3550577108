"""Makes test helpers importable from every test folder, and gives tests on a GPU time to compile kernels."""

from __future__ import annotations

import os

import pytest

GPU_TIMEOUT_S = 300
"""Time limit of a GPU test without a limit of its own. The first test that uses a kernel compiles it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test that runs on a GPU a time limit, unless it has one."""
    on_gpu = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu") != "cpu"
    for item in items:
        if (on_gpu or item.get_closest_marker("gpu")) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S))
