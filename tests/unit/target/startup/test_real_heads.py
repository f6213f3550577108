"""For heads of real sizes, a start compiles every kernel variant that loads need.

It compiles some variants before the server is ready, and others in the background. The toy heads of
`test_kernel_signatures` take other block sizes of attention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support.kernels.real_heads import __file__ as script


@pytest.fixture(scope="module", params=["EAGLE3", "STANDALONE"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(script), request.param],
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout[run.stdout.index('{"planned"') :])
    return result


@pytest.mark.parametrize("load", ["prompts", "catch-ups", "rounds", "drafts"])
def test_a_load_needs_no_kernel_that_the_start_did_not_compile(found: dict[str, Any], load: str) -> None:
    """Prompts with and without cached tokens, drafts that have fallen behind, and rounds without graphs."""
    assert found["planned"] > 150
    assert found["late"][load] == []
