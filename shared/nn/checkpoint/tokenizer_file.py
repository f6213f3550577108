"""Reads and fingerprints the vocabulary of a ``tokenizer.json``, to compare two folders' token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.json_config import read_json

TOKENIZER_FILE = "tokenizer.json"


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the tokenizer vocabulary of a model folder, which maps tokens (including added tokens) to ids.

    If the folder has no ``tokenizer.json``, return None.

    Raises:
        CheckpointError: The file is not JSON, or its vocabulary is malformed.
    """
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        return None
    raw = read_json(file)
    try:
        vocabulary = _vocabulary_of(raw)
    except (TypeError, ValueError, AttributeError, LookupError):
        vocabulary = None
    if vocabulary is None or not all(
        isinstance(token, str) and type(number) is int for token, number in vocabulary.items()
    ):
        raise CheckpointError(
            f"{file}: model.vocab and added_tokens must map each token to an integer id; "
            "download the file again.",
            field=str(file),
        )
    return vocabulary


def _vocabulary_of(raw: Mapping[str, Any]) -> dict[str, int]:
    """Return a map of tokens to ids. A Unigram vocabulary is a list of (token, score) in the order of ids."""
    vocabulary = (raw.get("model") or {}).get("vocab") or {}
    tokens = (
        dict(vocabulary)
        if isinstance(vocabulary, Mapping)
        else {entry[0]: index for index, entry in enumerate(vocabulary)}
    )
    return tokens | {added["content"]: added["id"] for added in raw.get("added_tokens") or []}


def tokenizer_fingerprint(folder: Path) -> str:
    """Return a digest of a model folder's vocabulary, or "" if the folder has no tokenizer.

    The digest does not depend on the formatting of ``tokenizer.json``.
    """
    vocabulary = read_vocabulary(folder)
    if vocabulary is None:
        return ""
    return hashlib.sha256(
        json.dumps(sorted(vocabulary.items(), key=lambda entry: (entry[1], entry[0]))).encode()
    ).hexdigest()
