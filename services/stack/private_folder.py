"""Makes the private folder for the sockets of a stack, and removes the folders of killed stacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "outrider-"
_NAME = re.compile(rf"{PREFIX}(\d+)-\w+")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Context manager that makes a folder that only this user can enter, and removes the folder on exit.

    The folder's name contains the id of this process. A later stack can therefore recognise and remove the
    folder of a killed stack.
    """
    remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def restore(folder: Path) -> None:
    """Make a private folder again if it was removed while its stack runs.

    Sockets that were in the folder are lost.

    Raises:
        PermissionError: Another user has created a file or folder of the same name.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if folder.is_symlink() or folder.lstat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user") from None
    except OSError:
        return  # the service reports the problem when it cannot bind its socket


def remove_abandoned(parent: Path) -> None:
    """Remove the private folders that ended processes of this user left in `parent`. Ignore errors.

    The folder of a daemon of NVIDIA's multi-process service (MPS) is kept. The daemon may still run, and the
    pipes in the folder are needed to stop it.
    """
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            match = _NAME.fullmatch(folder.name)
            if match and not Path(f"/proc/{match[1]}").exists() and _is_ours(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    plain = folder.is_dir() and not folder.is_symlink() and not (folder / "mps").exists()
    return found.st_uid == os.getuid() and plain
