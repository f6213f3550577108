"""The source code recorded in a result: the commit, and git's object ids, computed without git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from outrider.bench.report.source import PARTS, REVISION, ROOT, recorded_source, tree_id

IDENTITY = {f"GIT_{who}_{what}": "someone" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *arguments: str) -> str:
    environment = os.environ | IDENTITY | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(
        ["git", "-C", folder, *arguments], check=True, capture_output=True, text=True, env=environment
    ).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for part in (*PARTS, "bench/results"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "code.py").write_text(f"{part}\n")
    kernels = tmp_path / "kernels"
    for name in ("sub", "sub/empty", "sub.d", "__pycache__"):  # git sorts sub.d before sub
        (kernels / name).mkdir()
    (kernels / "sub" / "é.py").write_bytes(b"\0\xff")
    (kernels / "sub.d" / "tool").write_text("#!/bin/sh\n")
    (kernels / "sub.d" / "tool").chmod(0o755)
    (kernels / "link").symlink_to("sub/é.py")
    (kernels / "__pycache__" / "code.pyc").write_bytes(b"compiled")
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_a_folder_has_the_id_that_git_gives_it(checkout: Path) -> None:
    for part in PARTS:
        assert tree_id(checkout / part) == git(checkout, "rev-parse", f"HEAD:{part}")
    before = tree_id(checkout / "kernels")
    (checkout / "kernels" / "sub.d" / "tool").chmod(0o644)
    assert tree_id(checkout / "kernels") != before


def test_a_checkout_names_its_commit_and_whether_files_differ(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REVISION, "another")
    (checkout / "bench" / "results" / "new.json").write_text("{}")
    commit = git(checkout, "rev-parse", "HEAD")
    recorded_source.cache_clear()
    recorded = recorded_source(checkout)
    assert (recorded["commit"], recorded["modified"]) == (commit, False), "results are not part of the source"
    assert recorded["trees"] == {part: git(checkout, "rev-parse", f"HEAD:{part}") for part in PARTS}
    (checkout / "bench" / "new.py").write_text("")
    assert recorded_source(checkout) is recorded, "the source is recorded once per process"
    recorded_source.cache_clear()
    assert recorded_source(checkout)["modified"] is True
    monkeypatch.setenv("PATH", os.devnull)
    recorded_source.cache_clear()
    assert recorded_source(checkout) | {"trees": {}} == {
        "commit": "another",
        "modified": None,
        "trees": {},
    }, "without git, a checkout is treated as a copy"


def test_a_copy_names_the_commit_that_it_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = checkout / "copy"
    for part in PARTS:
        (copy / part).mkdir(parents=True)
    recorded_source.cache_clear()
    monkeypatch.delenv(REVISION, raising=False)
    assert recorded_source(copy)["commit"] is None, "a folder inside a checkout is not a checkout"
    monkeypatch.setenv(REVISION, "abc")
    recorded_source.cache_clear()
    assert recorded_source(copy)["commit"] == "abc"
    recorded_source.cache_clear()


def test_this_package_is_found() -> None:
    assert (ROOT / "bench" / "report" / "source.py").is_file()
    assert all(any((ROOT / part).rglob("*.py")) for part in PARTS)
