"""Downloads a model from a Hugging Face hub into the cache, and explains what can go wrong."""

from __future__ import annotations

from pathlib import Path

from outrider.services.hub.snapshot import CONFIGS, missing_file, wanted_files
from outrider.shared.base.errors import ConfigurationError, OutriderError, UnavailableError


def cached_snapshot(name: str, revision: str | None, cache: Path | None = None) -> Path | None:
    """Return the folder of a complete model snapshot in the Hugging Face cache, without using the network.

    Args:
        name: ``ORG/NAME``.
        revision: Branch, tag or commit. None means ``main``.
        cache: Folder of the cache. None means the folder in the environment variable HF_HUB_CACHE, or the
            subfolder ``hub`` of the folder in HF_HOME.
    """
    from huggingface_hub import try_to_load_from_cache

    for config in CONFIGS:
        found = try_to_load_from_cache(name, config, cache_dir=cache, revision=revision)
        if isinstance(found, str) and not missing_file(Path(found).parent):
            return Path(found).parent
    return None


def download_snapshot(
    name: str, revision: str | None, flag: str, cache: Path | None = None, endpoint: str | None = None
) -> Path:
    """Download a model's files that the services read, with a progress bar on stderr.

    If the download breaks off, finished files stay in the cache, and the next attempt continues after them.
    The weights come last, so that a snapshot with complete weights also has its tokenizer.

    Args:
        name: ``ORG/NAME``.
        revision: Branch, tag or commit. None means ``main``.
        flag: The flag that named the model, for error messages.
        cache: Folder of the cache. None means the folder in the environment variable HF_HUB_CACHE, or the
            subfolder ``hub`` of the folder in HF_HOME.
        endpoint: Address of the hub. None means the address in the environment variable HF_ENDPOINT, or
            huggingface.co.

    Returns:
        The folder of the snapshot.

    Raises:
        ConfigurationError: The hub has no such model or revision, the user has not accepted the model's
            terms, or the model has no weights that Outrider can read.
        UnavailableError: The hub cannot be reached, or the download broke off.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        api = HfApi(endpoint=endpoint)
        info = api.model_info(name, revision=revision)
        small, weights = wanted_files(file.rfilename for file in info.siblings or ())
        if not weights or not any(config in small for config in CONFIGS):
            raise ConfigurationError(
                f"{flag} {name}: the repository has no config.json with safetensors weights. Outrider reads "
                "models in Hugging Face layout, not GGUF or other formats.",
                field=flag,
            )
        snapshot_download(name, revision=revision, cache_dir=cache, endpoint=endpoint, allow_patterns=small)
        folder = Path(
            snapshot_download(
                name,
                revision=info.sha or revision,
                cache_dir=cache,
                endpoint=endpoint,
                allow_patterns=small + weights,
            )
        )
    except OutriderError:
        raise
    except Exception as error:
        # huggingface_hub does not wrap the errors of its HTTP library, and its versions use different
        # libraries.
        raise _explained(error, name, revision, flag, endpoint) from error
    if missing := missing_file(folder):
        raise UnavailableError(
            f"{flag} {name}: the download is incomplete; {folder / missing} is missing. Run the command "
            "again.",
            field=flag,
        )
    return folder


def _explained(
    error: Exception, name: str, revision: str | None, flag: str, endpoint: str | None
) -> OutriderError:
    """Return the error for a failed download, with the fix that fits."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = endpoint or constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return ConfigurationError(
            f"{flag} {name}: the repository is gated. Accept its terms at {hub}/{name}, and set HF_TOKEN to "
            "an access token of the account that accepted them.",
            field=flag,
        )
    if isinstance(error, RepositoryNotFoundError):
        return ConfigurationError(
            f"{flag} {name}: there is no such folder here, and {hub} has no repository {name} that you may "
            "read. Check the spelling. For a private repository, set HF_TOKEN.",
            field=flag,
        )
    if isinstance(error, RevisionNotFoundError):
        return ConfigurationError(
            f"{flag} {name}: the repository has no revision {revision or 'main'}. Give a branch, a tag or a "
            "commit.",
            field=flag,
        )
    if isinstance(error, HFValidationError):
        return ConfigurationError(f"{flag} {name}: there is no such folder.", field=flag)
    if isinstance(error, OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return ConfigurationError(
            f"{flag} {name}: the model is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE "
            "forbids a download. Unset HF_HUB_OFFLINE, or give the folder of a downloaded model.",
            field=flag,
        )
    cause = str(error).strip().splitlines()
    return UnavailableError(
        f"{flag} {name}: the download from {hub} failed: {cause[0] if cause else type(error).__name__}. "
        "Check the network, HF_ENDPOINT and the free space of the cache, and run the command again; it "
        "keeps the finished files.",
        field=flag,
    )
