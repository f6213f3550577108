"""Reads an FR-Spec token map: the frequent tokens that a head with a full vocabulary may draft.

Source: FR-Spec (arXiv 2502.14856). Published maps are files such as ``freq_32768.pt``. Each file contains a
tensor or a list of target ids, with the most frequent id first.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.tensor_file import open_tensor_file
from outrider.shared.obs.logging import get_logger
from outrider.shared.spec.algorithm import TOKEN_MAP_SUFFIXES

log = get_logger("outrider.draft")
FIELD = "speculative_token_map"


def read_token_map(path: Path) -> torch.Tensor:
    """Read an FR-Spec token map from ``.pt``/``.bin`` (with weights_only), ``.safetensors`` or ``.json``.

    Returns:
        ``[size] int64``, distinct target ids in the file's order.

    Raises:
        CheckpointError: The file is missing or corrupt, would run code when loaded, or is not a single list
            of ids.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise CheckpointError(
            f"{path}: a token map must be one of {', '.join(READERS)}, not "
            f"{path.suffix or 'a file without suffix'}.",
            field=FIELD,
        )
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. Give the file of the token map.", field=FIELD)
    content = reader(path)
    if isinstance(content, Mapping):
        if len(content) != 1:
            raise CheckpointError(
                f"{path} contains {len(content)} entries ({', '.join(map(str, content))}). Keep only the "
                "ids.",
                field=FIELD,
            )
        content = next(iter(content.values()))
    if isinstance(content, list) and all(
        isinstance(token, int) and not isinstance(token, bool) for token in content
    ):
        content = torch.tensor(content, dtype=torch.int64)
    if (
        not isinstance(content, torch.Tensor)
        or content.dtype.is_floating_point
        or content.dtype == torch.bool
        or content.dim() != 1
    ):
        raise CheckpointError(
            f"{path} must contain a single list of token ids (integers). Export the map again.", field=FIELD
        )
    ids = content.to(torch.int64)
    if not ids.numel():
        raise CheckpointError(f"{path} contains no token id. Export the map again.", field=FIELD)
    if int(ids.min()) < 0:
        raise CheckpointError(
            f"{path} contains the negative id {int(ids.min())}. It must contain target ids, not offsets.",
            field=FIELD,
        )
    return _merged(ids, path)


def _merged(ids: torch.Tensor, path: Path) -> torch.Tensor:
    """Return the ids without repetitions. Each id keeps its first position.

    FR-Spec's own script adds special tokens to the frequent ones, so that a map can contain an id twice.
    """
    distinct = list(dict.fromkeys(ids.tolist()))
    if len(distinct) == ids.shape[0]:
        return ids
    log.info("token map: repeated ids merged", file=str(path), ids=ids.shape[0], distinct=len(distinct))
    return torch.tensor(distinct, dtype=torch.int64)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error}). Export the map again.", field=FIELD
        ) from error


def _read_pickled(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} cannot be read without running code from it. Export the map as JSON.", field=FIELD
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} is truncated or corrupt ({error}). Download it again.", field=FIELD
        ) from error


def _read_safetensors(path: Path) -> object:
    file = open_tensor_file(path)
    tensors = {name: file.read(name).clone() for name in file.tensors}
    file.close()
    return tensors


READERS: Mapping[str, Callable[[Path], object]] = {
    suffix: {".safetensors": _read_safetensors, ".json": _read_json}.get(suffix, _read_pickled)
    for suffix in TOKEN_MAP_SUFFIXES
}
