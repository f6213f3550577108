"""A target imports every library before it loads the model, and none later.

Some functions import a large library when they are first called. For example, `torch.unravel_index` imports
sympy. A start that calls such a function takes longer.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from outrider.services.target import app
from outrider.services.target.settings import TargetSettings
from outrider.services.target.startup.warmup import run_through
from outrider.services.hub.pair import DEMO_TARGET

settings = TargetSettings.load(
    {"model": DEMO_TARGET, "device": "cpu", "threads": 1, "max_running_requests": 2, "kv_tokens": 4096}
)
before = set(sys.modules)
target = app.Target(settings)
run_through(target.engine, target.serving.limits)
late = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(late - {"outrider"}))
target.shutdown()
"""


def test_a_start_imports_no_library_late() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"
