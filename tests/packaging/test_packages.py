"""The package as users get it: every build contains the same files, and the wheel alone serves a request.

These tests are slow, because they fill two environments. Run them with `make package-test`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
# Folders of the repository and their place in the package, as mapped by setup.py.
ROOTS = {
    "kernels": "outrider/kernels",
    "shared": "outrider/shared",
    "services": "outrider/services",
    "train": "outrider/train",
    "bench": "outrider/bench",
    "protos/outrider": "outrider",
    "models/demo": "outrider/models/demo",
}
NOT_PACKAGED = ("bench/results/",)


def run(*command: str | Path, cwd: Path, timeout_s: float = 600) -> str:
    """Run a program without this environment's import paths and return its output."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-6000:]}"
    return done.stdout


@dataclass(frozen=True, slots=True)
class Distributions:
    """The built distributions: the wheel from the tree, the sdist, and the wheel from the sdist."""

    wheel: Path
    sdist: Path
    wheel_of_sdist: Path


def package_files(wheel: Path) -> set[str]:
    """Return the files of a wheel without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}


def source_files() -> dict[str, Path]:
    """Return the repository's files that belong in the package, by their name in the package."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    files = {}
    for name in listed:
        for folder, package in ROOTS.items():
            if name.startswith(f"{folder}/") and not name.startswith(NOT_PACKAGED) and (ROOT / name).exists():
                files[f"{package}{name.removeprefix(folder)}"] = ROOT / name
    return files


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build from a copy of the repository, so that the repository stays clean."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder / "direct", tree, cwd=folder)
    # Without a choice, `build` makes the sdist, and then the wheel from the sdist alone.
    run(sys.executable, "-m", "build", "--outdir", folder / "chain", tree, cwd=folder)
    (wheel,), (sdist,), (wheel_of_sdist,) = (
        list(folder.glob(pattern)) for pattern in ("direct/*.whl", "chain/*.tar.gz", "chain/*.whl")
    )
    return Distributions(wheel, sdist, wheel_of_sdist)


def test_wheel_and_sdist_hold_the_same_files_as_the_repository(distributions: Distributions) -> None:
    expected = set(source_files())
    assert {
        "outrider/services/cli/commands.py",
        "outrider/target/v1/target_pb2.pyi",
        "outrider/bench/prompts/heldout.jsonl",
    } <= expected
    assert "outrider/models/demo/target/tokenizer.json" in expected
    assert package_files(distributions.wheel) == expected
    assert package_files(distributions.wheel_of_sdist) == expected


def test_wheel_carries_the_licence_and_no_generic_top_level_package(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as archive:
        assert any(re.search(r"\.dist-info/licenses/LICENSE$", name) for name in archive.namelist())
        assert {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" not in name} == {
            "outrider"
        }


def test_editable_install_imports_the_same_modules(distributions: Distributions) -> None:
    """This environment's editable install resolves every module of the wheel to the repository's own file."""
    files = source_files()
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): str(path)
        for name, path in files.items()
        if name.endswith(".py")
    }
    find = "{name: getattr(importlib.util.find_spec(name), 'origin', None) for name in json.load(sys.stdin)}"
    program = f"import importlib.util, json, sys; print(json.dumps({find}))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(list(modules)),
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    assert json.loads(done.stdout) == modules


@pytest.fixture(scope="module")
def fresh(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with only the wheel and the gateway's dependencies. Returns its bin folder."""
    folder = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    run(
        folder / "venv/bin/python",
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        distributions.wheel,
        cwd=folder,
    )
    return folder / "venv/bin"


def test_gateway_needs_no_torch_and_the_rest_says_what_is_missing(fresh: Path, tmp_path: Path) -> None:
    imports = "import outrider.services.gateway.app, importlib.util; print(importlib.util.find_spec('torch'))"
    assert run(fresh / "python", "-c", imports, cwd=tmp_path).strip() == "None"
    assert "--target" in run(fresh / "outrider", "serve", "gateway", "--help", cwd=tmp_path)
    refused = subprocess.run([str(fresh / "outrider"), "up"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "pip install 'outrider[engine]'" in refused.stderr


def test_the_wheel_alone_serves_a_request_and_stops_cleanly(
    fresh: Path, distributions: Distributions, tmp_path: Path
) -> None:
    run(
        fresh / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        f"{distributions.wheel}[engine]",
        cwd=tmp_path,
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [str(fresh / "outrider"), "up", "--port", str(port)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("up "):
                break
        assert lines[-1].startswith("up "), "".join(lines)
        answer = run(
            fresh / "outrider",
            "generate",
            "List 3 countries and their capitals.",
            "--speculation",  # in mode auto, a busy machine may rightly decode plainly
            "on",
            "--url",
            f"http://127.0.0.1:{port}",
            cwd=tmp_path,
        )
        assert re.search(r"accept length \d", answer), answer
        reply = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False).json()
        assert len(reply["data"]) == 1
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        process.stderr.close()
        process.wait(60)
    assert process.returncode == 0, rest
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
