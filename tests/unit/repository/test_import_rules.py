"""The import rules of `.importlinter` detect every kind of violation, planted into a copy of the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("kernels", "shared", "services", "train", "bench")
RUN = "from importlinter.cli import lint_imports_command; lint_imports_command()"

PLANTED = [
    ("shared/spec/fence.py", "outrider.kernels.verify"),
    ("shared/spec/tree.py", "outrider.common.v1.common_pb2"),
    ("kernels/verify/reference.py", "fastapi"),
    ("kernels/kv_store/reference.py", "transformers"),
    ("kernels/philox/reference.py", "outrider.shared.base.errors"),
    ("services/target/engine/engine.py", "outrider.target.v1.target_pb2"),
    ("services/target/scheduling/limits.py", "google"),
    ("services/gateway/app.py", "outrider.gateway.v1.gateway_pb2_grpc"),
    ("services/gateway/stop.py", "torch"),
    ("services/stack/supervisor.py", "outrider.services.draft.engine"),
    ("services/stack/demo.py", "outrider.services.target.settings"),
    ("services/target/scheduling/scheduler.py", "outrider.services.draft.sessions.session"),
    ("bench/measure/speculation.py", "outrider.services.gateway.settings"),
    ("shared/nn/config/model_config.py", "outrider.services.cli.settings_options"),
]


def lint(root: Path) -> tuple[int, str]:
    """Run import-linter on the sources in `root`.

    Return its exit code and its output with runs of blanks collapsed.
    """
    environment = {**os.environ, "PYTHONPATH": str(root / "farm"), "COLUMNS": "400"}
    command = [sys.executable, "-c", RUN, "--no-cache"]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, root / "farm" / "outrider" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for folder in (ROOT / "protos" / "outrider").iterdir():
        shutil.copytree(
            folder, root / "farm" / "outrider" / folder.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", root)
    return root


def test_every_planted_violation_is_found(sources: Path) -> None:
    for path, module in PLANTED:
        with (sources / "farm" / "outrider" / path).open("a") as file:
            file.write(f"\nimport {module}\n")
    code, output = lint(sources)
    assert code == 1, output
    for path, module in PLANTED:
        importer = "outrider." + path.removesuffix(".py").replace("/", ".")
        found = any(f"{importer} {verb} {module} (l" in output for verb in ("->", "imports"))
        assert found, f"{importer} may import {module}: {output}"
