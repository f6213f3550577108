"""Each contract of `.importlinter` reports a violation.

The tests violate each contract once in a copy of the sources.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("kernels", "shared", "services", "train", "bench")
RUN = "from importlinter.cli import lint_imports_command; lint_imports_command()"
TYPE_ONLY = "\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {}\n"

# Contract, file that gets the import, imported module.
PLANTED = [
    (
        "Kernels import no other part of Outrider",
        "kernels/philox/reference.py",
        "outrider.shared.base.errors",
    ),
    ("Kernels import torch, Triton, FlashInfer and NumPy", "kernels/verify/reference.py", "fastapi"),
    ("Kernels import torch, Triton, FlashInfer and NumPy", "kernels/kv_store/reference.py", "transformers"),
    ("In shared code, only attention", "shared/spec/fence.py", "outrider.kernels.verify"),
    ("Protobuf messages stop", "shared/spec/tree.py", "outrider.common.v1.common_pb2"),
    ("Protobuf messages stop", "services/target/engine/engine.py", "outrider.target.v1.target_pb2"),
    ("Protobuf messages stop", "services/target/scheduling/limits.py", "google"),
    ("Protobuf messages stop", "services/gateway/app.py", "outrider.gateway.v1.gateway_pb2_grpc"),
    ("Replies to peers", "services/draft/peers/replies.py", "outrider.draft.v1.draft_pb2"),
    ("Only the command line", "services/stack/supervisor.py", "outrider.services.draft.engine"),
    ("Only the command line", "services/stack/demo.py", "outrider.services.target.settings"),
    ("Only the command line", "bench/measure/speculation.py", "outrider.services.gateway.settings"),
    (
        "Services do not import each other",
        "services/target/scheduling/scheduler.py",
        "outrider.services.draft.sessions.session",
    ),
    (
        "Shared code imports no service",
        "shared/nn/config/model_config.py",
        "outrider.services.cli.settings_options",
    ),
    ("The gateway imports no torch", "services/gateway/stop.py", "torch"),
    ("Order inside shared", "shared/base/errors.py", "outrider.shared.spec.fence"),
    (
        "Order of the target's rooms",
        "services/target/policy/cost_model.py",
        "outrider.services.target.model.outcome",
    ),
    (
        "Only the target's app",
        "services/target/engine/inbox.py",
        "outrider.services.target.draft_client.breaker",
    ),
    (
        "Order inside the target's draft client",
        "services/target/draft_client/transport/create.py",
        "outrider.services.target.draft_client.breaker",
    ),
    (
        "Order of the draft's rooms",
        "services/draft/sessions/session.py",
        "outrider.services.draft.heads.registry",
    ),
    ("Order inside the model code", "shared/nn/checkpoint/read_ahead.py", "outrider.shared.nn.layers.linear"),
    ("Order of the command line", "services/doctor/finding.py", "outrider.services.stack.mps"),
    ("Order of the benchmarks", "bench/report/record.py", "outrider.bench.measure.clock"),
]
CIRCLES = [
    ("services/target/policy/cost_model.py", "outrider.services.target.policy.controller"),
    ("shared/kv/pages.py", "outrider.shared.kv.pool"),
]


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, tmp_path / "farm" / "outrider" / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for folder in (ROOT / "protos" / "outrider").iterdir():
        shutil.copytree(
            folder, tmp_path / "farm" / "outrider" / folder.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def lint(root: Path) -> tuple[int, str]:
    """Run import-linter over `root`. Return its exit code, and its output with single blanks."""
    environment = {**os.environ, "PYTHONPATH": str(root / "farm"), "COLUMNS": "400"}
    command = [sys.executable, "-c", RUN, "--no-cache"]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=100)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def plant(root: Path, path: str, text: str) -> None:
    with (root / "farm" / "outrider" / path).open("a") as file:
        file.write(text)


def importer_of(path: str) -> str:
    return "outrider." + path.removesuffix(".py").replace("/", ".")


def inner_orders() -> list[tuple[str, str, str, str]]:
    """Return name, container, a lowest file and a highest file of each contract inside a room."""
    parser = ConfigParser()
    parser.read(ROOT / ".importlinter")
    found = []
    for section in parser.sections():
        if ":inside-" in section:
            contract = parser[section]
            layers = [re.split(r" [|] ", layer) for layer in contract["layers"].split("\n") if layer]
            found.append((contract["name"], contract["containers"].strip(), layers[-1][0], layers[0][0]))
    return found


def test_every_contract_has_a_violation_here() -> None:
    parser = ConfigParser()
    parser.read(ROOT / ".importlinter")
    names = [parser[section]["name"] for section in parser.sections() if ":contract:" in section]
    planted = {contract for contract, _path, _module in PLANTED} | {"No file imports itself"}
    planted |= {name for name, *_rest in inner_orders()}
    assert [name for name in names if not any(name.startswith(contract) for contract in planted)] == []


def test_every_planted_violation_breaks_its_contract(sources: Path) -> None:
    for _contract, path, module in PLANTED:
        plant(sources, path, f"\nimport {module}\n")
    code, output = lint(sources)
    assert code == 1, output
    for contract, path, module in PLANTED:
        importer = importer_of(path)
        verdicts = output.split(contract, 2)[1]
        assert verdicts.split("KEPT")[0].count("BROKEN"), f"{contract} is kept: {output}"
        found = any(f"{importer} {verb} {module} (l" in output for verb in ("->", "imports"))
        assert found, f"{importer} may import {module}: {output}"


def test_an_import_that_runs_up_inside_a_room_is_found(sources: Path) -> None:
    planted = []
    for name, container, low, high in inner_orders():
        folder = container.removeprefix("outrider.").replace(".", "/")
        path = f"{folder}/{low}.py"
        if not (sources / "farm" / "outrider" / path).exists():
            path = f"{folder}/{low}/__init__.py"
        plant(sources, path, f"\nimport {container}.{high}\n")
        planted.append((name, f"{container}.{low}", f"{container}.{high}"))
    assert len(planted) > 30
    code, output = lint(sources)
    assert code == 1, output
    for name, low, high in planted:
        assert f"{name} BROKEN" in output, f"{low} may import {high}: {output}"


@pytest.mark.parametrize("statement", ["\nimport {}\n", TYPE_ONLY], ids=["run time", "type only"])
def test_a_circle_of_files_is_found(sources: Path, statement: str) -> None:
    for path, module in CIRCLES:
        plant(sources, path, statement.format(module))
    code, output = lint(sources)
    assert code == 1, output
    for path, module in CIRCLES:
        assert f"{importer_of(path)} imports {module}." in output, output
