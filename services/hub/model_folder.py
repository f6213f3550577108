"""Turns the model that a user names into a folder: a local path, or `ORG/NAME` on a hub (`model_folder`)."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from outrider.shared.base.errors import ConfigurationError

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


def is_hub_name(name: str | Path) -> bool:
    """Return True for ``ORG/NAME`` if there is no local file or folder of that name."""
    return HUB_NAME.fullmatch(str(name)) is not None and not Path(name).exists()


def model_folder(
    name: str | Path,
    flag: str,
    revision: str | None = None,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return the folder of a model, after downloading the model from the Hugging Face hub if necessary.

    The library huggingface_hub reads the environment variables HF_TOKEN, HF_ENDPOINT, HF_HOME and
    HF_HUB_OFFLINE.

    Args:
        name: A folder, or ``ORG/NAME``. Any other name is returned unchanged, so that opening it fails later
            with a suitable message.
        flag: The flag that named the model, for error messages.
        revision: Branch, tag or commit on the hub.
        cache: Folder of the Hugging Face cache. None selects the folder that the environment variables name.
        endpoint: Address of the hub. None selects the address in the environment variable HF_ENDPOINT.

    Raises:
        ConfigurationError: The hub has no such model, or a revision is given for a folder.
        UnavailableError: The hub cannot be reached, or the download broke off.
    """
    if not is_hub_name(name):
        if revision:
            raise ConfigurationError(
                f"{flag} {name} is not a model on the hub, so the revision {revision} has no meaning. Remove "
                "the revision, or give ORG/NAME.",
                field=flag,
            )
        return Path(name)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigurationError(
            f"{flag} {name}: there is no such folder, and a download needs huggingface_hub. Run: pip install "
            "'outrider[engine]'.",
            field=flag,
        )
    # Imported here because huggingface_hub imports an HTTP library, which is not needed for a local folder.
    from outrider.services.hub.download import cached_snapshot, download_snapshot

    cached = cached_snapshot(str(name), revision, cache)
    return cached or download_snapshot(str(name), revision, flag, cache, endpoint)
