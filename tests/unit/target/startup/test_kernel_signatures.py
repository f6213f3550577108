"""Every kernel variant that mixed requests need is one that the start plans to compile.

A missing variant would be compiled when it is launched, and all requests would wait for it. The parity check
needs no variant of its own, which would delay every start with an empty kernel cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.kernels.kernel_signatures import __file__ as script


def test_mixed_requests_need_no_kernel_that_was_not_planned() -> None:
    """Joins, leaves, catch-ups, all modes, several trees, filters, rules, logprobs and traces."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(script), "EAGLE3"],
        env={**variables, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout[run.stdout.index('{"planned"') :])
    assert found["planned"] > 50
    assert found["rounds"] > 20
    assert found["late"] == []
    assert found["of_check"] == []
