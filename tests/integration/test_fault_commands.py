"""`outrider bench soak`, `overload`, `move` and `stall` run as commands, as briefly as possible."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = {
    "soak": ["--minutes", "0.1", "--clients", "2", "--pause", "0"],
    "overload": [
        "--requests",
        "10",
        "--capacity-seconds",
        "6",
        "--max-tokens",
        "8",
        "--max-queue-wait",
        "0.2",
    ],
    "move": ["--rounds", "1", "--streams", "4", "--new-tokens", "256", "--devices", "cpu,cpu"],
    "stall": ["--streams", "1", "--repeats", "1", "--quiet", "0.1"],
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_runs_and_writes_its_figures(name: str, tmp_path: Path) -> None:
    output = tmp_path / f"{name}.json"
    device = [] if name == "move" else ["--device", "cpu"]
    command = [sys.executable, "-m", "outrider.services.cli", "bench", name, *COMMANDS[name], *device]
    done = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(output.read_text())["rows"]
