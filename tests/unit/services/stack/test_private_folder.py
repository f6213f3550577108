"""The private folder of a stack: closed to others, and removed even if its stack was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.services.stack.private_folder import PREFIX, private_folder, remove_abandoned, restore


def test_folders_of_dead_stacks_are_removed_and_others_stay(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = tmp_path / f"{PREFIX}{ended.pid}-abc"
    others = [tmp_path / f"{PREFIX}{os.getpid()}-abc", tmp_path / f"{PREFIX}x", tmp_path / "else"]
    for folder in (dead, *others):
        folder.mkdir()
        (folder / "target.sock").touch()
    daemon = tmp_path / f"{PREFIX}{ended.pid}-mps"
    (daemon / "mps").mkdir(parents=True)
    link = tmp_path / f"{PREFIX}{ended.pid}-link"
    link.symlink_to(others[2])
    remove_abandoned(tmp_path)
    assert not dead.exists()
    assert daemon.exists(), "the daemon may still run"
    assert all((folder / "target.sock").exists() for folder in others)


def test_the_folder_is_private_and_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        remove_abandoned(tmp_path)
        assert folder.exists()
    assert not folder.exists()


def test_a_removed_folder_is_made_again_for_this_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "stack"
    restore(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "socket").touch()
    restore(folder)
    assert (folder / "socket").exists()
    restore(tmp_path / "missing" / "stack")  # a start that cannot work is left to the service to explain


def test_a_folder_that_another_user_has_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "stack").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="another user"):
        restore(tmp_path / "stack")
