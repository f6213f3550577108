"""Returns the names and paths of models, and explains symbolic links whose destinations are missing."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_PREFIX = "models--"


def model_name(folder: Path) -> str:
    """Return the name of the model in a folder, as clients see it.

    A snapshot in the Hugging Face cache (``models--ORG--NAME/snapshots/COMMIT``) is named ``ORG/NAME``. The
    name of any other folder is the last component of its path.
    """
    folder = folder.resolve()
    return _hub_name(folder) or folder.name


def model_path(folder: Path) -> str:
    """Return the name on the hub of the model in a folder, or else the absolute path of the folder."""
    return _hub_name(folder.resolve()) or str(folder.absolute())


def _hub_name(folder: Path) -> str:
    """Return ``ORG/NAME`` for a snapshot in the Hugging Face cache. Empty for any other folder."""
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(CACHE_PREFIX):
        return repository.removeprefix(CACHE_PREFIX).replace("--", "/")
    return ""


def dangling_link(path: Path) -> str:
    """Explain a symbolic link whose destination is missing.

    Returns:
        A sentence that names the link, its destination and the fix. Empty if `path` is no such link.
    """
    if not path.is_symlink() or path.exists():
        return ""
    return (
        f"{path} is a link to {os.readlink(path)}, which does not exist here. The files of a Hugging Face "
        "snapshot are links into the cache's blobs folder. Make the whole cache folder available (in a "
        "container: mount it, not only the snapshot), or download the model again."
    )


def dangling_links(folder: Path) -> str:
    """Return the explanation of the first dangling link in a folder, or an empty text."""
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((text for path in names if (text := dangling_link(path))), "")
