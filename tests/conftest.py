"""Makes the helpers beside this file (toys) importable from every test folder, and gives tests on a GPU time to compile their kernels."""

from __future__ import annotations

import os

import pytest

GPU_TIMEOUT_S = 300
"""Of a test on a GPU that names no limit: the first to meet a kernel waits until it is compiled, beside others that compile theirs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = os.environ.get("OUTRIDER_TEST_DEVICE", "cpu") != "cpu"
    for item in items:
        if (on_gpu or item.get_closest_marker("gpu")) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S))
