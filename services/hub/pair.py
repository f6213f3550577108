"""The embedded pair of target and draft: its folders, its name, and when it is the default."""

from __future__ import annotations

import os
from pathlib import Path

from outrider.shared.spec.algorithm import Algorithm

# The folder that contains services/, models/ and bench/, both in a checkout and in an installed package.
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
DEMO_TARGET = PACKAGE_ROOT / "models" / "demo" / "target"
DEMO_DRAFT = PACKAGE_ROOT / "models" / "demo" / "eagle3"
DEMO_NAME = "outrider-demo"
"""Model name of the embedded target in requests, unless the user chooses a model or a name."""


def demo_name(target: object) -> str | None:
    """Return the model id of the embedded target, or None if the user chose a model or a model id.

    Args:
        target: The model that the user named, or None.
    """
    chosen = target is not None or os.environ.get("OUTRIDER_TARGET_SERVED_MODEL_ID")
    return None if chosen else DEMO_NAME


def draft_path(target: object, draft: str | None, algorithm: Algorithm) -> Path | None:
    """Return the folder of the draft, or its name on the hub. None means that there is no draft folder.

    Without `draft`, this is the embedded head if it can be used. The embedded head is an EAGLE-3 head that
    fits the embedded target only.

    Args:
        target: The model that the user named, or None.
        draft: Value of `--draft`. ``none`` means no draft folder.
        algorithm: Value of `--speculative-algorithm`.
    """
    if draft is None:
        return DEMO_DRAFT if target is None and algorithm in (Algorithm.AUTO, Algorithm.EAGLE3) else None
    return None if draft == "none" else Path(draft)


def pair_folders(
    target: Path | None,
    draft: str | None,
    algorithm: Algorithm,
    revision: str | None,
    draft_revision: str | None,
) -> tuple[Path, Path | None]:
    """Return the folders of the target and the draft that the flags name. None means no draft folder.

    Without a target, the pair is the embedded one. Models of the hub are downloaded.

    Raises:
        ConfigurationError: A model cannot be found.
    """
    from outrider.services.hub.model_folder import model_folder

    found = draft_path(target, draft, algorithm)
    return (
        model_folder(target or DEMO_TARGET, "--target", revision),
        model_folder(found, "--draft", draft_revision) if found else None,
    )
