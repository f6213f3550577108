"""Builds the wheel of an earlier revision of this repository.

Usage: python scripts/earlier_wheel.py REVISION FOLDER

The build reads the files of the revision from git's history. It uses no network, and does not change the
checkout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAST_OF_DRAFT_PROTOCOL_2 = "47d9615e1dcc"
"""The last revision whose highest version of the draft protocol is 2."""


class HistoryError(Exception):
    """The repository does not contain the revision."""


def build_wheel(revision: str, folder: Path) -> Path:
    """Build the wheel of a revision into `folder`, and return its path.

    The current environment must contain setuptools.

    Raises:
        HistoryError: The checkout does not contain the revision, because it has no history.
        CalledProcessError: The build failed.
    """
    git = ("git", "-C", str(ROOT))
    known = subprocess.run([*git, "cat-file", "-e", f"{revision}^{{commit}}"], capture_output=True)
    if known.returncode:
        raise HistoryError(
            f"Revision {revision} is not in the history of this checkout. Fetch the whole history, for "
            "example with `git fetch --unshallow`."
        )
    with tempfile.TemporaryDirectory(prefix="outrider-") as name:
        tree = Path(name)
        archive = subprocess.run([*git, "archive", revision], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", name], check=True, input=archive)
        pip = (
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
        )
        subprocess.run([*pip, "--wheel-dir", str(folder.resolve()), "."], check=True, cwd=tree)
    (wheel,) = folder.glob("*.whl")
    return wheel


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).mkdir(parents=True, exist_ok=True)
    try:
        print(build_wheel(sys.argv[1], Path(sys.argv[2])))
    except HistoryError as error:
        sys.exit(str(error))
