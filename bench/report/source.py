"""Identifies the source code behind a result: the commit, and git's object ids of the folders in use."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""Parent of the package's folders, in a checkout, in a copy or in an installed package."""
PARTS = ("kernels", "shared", "services")
REVISION = "OUTRIDER_REVISION"
"""Environment variable that names the commit where there is no checkout."""
NOT_SOURCE = ("__pycache__",)
LINK, PROGRAM, FILE, FOLDER = b"120000", b"100755", b"100644", b"40000"
GIT_S = 10.0


@cache
def recorded_source(root: Path = ROOT) -> dict[str, Any]:
    """Return a description of the source code in `root` for result files, computed once per process.

    Returns:
        A dictionary with these keys.

        - commit: The commit that is checked out in `root`. Without a checkout, the value of the environment
          variable `OUTRIDER_REVISION`. None if neither exists.
        - modified: True if files of the package differ from the commit. None if there is no checkout.
        - trees: Folder → git's id for the files of the folder. If the code is that of a commit, this id
          equals the output of ``git rev-parse COMMIT:FOLDER``.
    """
    commit, modified = _checked_out(root) or (os.environ.get(REVISION), None)
    return {"commit": commit, "modified": modified, "trees": {part: tree_id(root / part) for part in PARTS}}


def tree_id(folder: Path) -> str:
    """Return git's id for the files of a folder. Compiled modules and empty folders are ignored."""
    return (_tree(folder) or _object(b"tree", b"")).hex()


def _tree(folder: Path) -> bytes | None:
    entries = []
    for path in folder.iterdir():
        if path.name in NOT_SOURCE:
            continue
        if path.is_symlink():
            mode, found = LINK, _object(b"blob", os.fsencode(path.readlink()))
        elif path.is_dir():
            below = _tree(path)
            if below is None:
                continue
            mode, found = FOLDER, below
        else:
            mode, found = (
                PROGRAM if path.stat().st_mode & 0o100 else FILE,
                _object(b"blob", path.read_bytes()),
            )
        name = os.fsencode(path.name)
        entries.append((name + b"/" if mode == FOLDER else name, b"%s %s\0%s" % (mode, name, found)))
    return _object(b"tree", b"".join(entry for _, entry in sorted(entries))) if entries else None


def _object(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(b"%s %d\0%s" % (kind, len(content), content), usedforsecurity=False).digest()


def _checked_out(root: Path) -> tuple[str, bool] | None:
    """Return the commit checked out in `root`, and True if the package's files differ from that commit.

    Returns None if `root` is not the root of a checkout.
    """
    found = _git(root, "rev-parse", "--show-prefix", "HEAD")
    if found is None or not found.startswith("\n"):  # a folder within some other repository has a prefix
        return None
    changes = _git(
        root, "status", "--porcelain", "--untracked-files=all", "--", *PARTS, "bench", ":!bench/results"
    )
    return found.strip(), bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        ran = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None
