"""Whether two model folders speak the same token ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config import read_json

TOKENIZER_FILE = "tokenizer.json"


def check_same_tokenizer(draft: Path, target: Path) -> bool:
    """Compare the vocabularies of two ``tokenizer.json``, added tokens included.

    Returns:
        Whether they could be compared: False when a folder has none.

    Raises:
        CheckpointError: they differ; names the first token that does.
    """
    files = (draft / TOKENIZER_FILE, target / TOKENIZER_FILE)
    if not all(file.is_file() for file in files):
        return False
    mine, theirs = (_vocabulary(read_json(file)) for file in files)
    for token in sorted(mine.keys() | theirs.keys(), key=lambda token: min(mine.get(token, 1 << 31), theirs.get(token, 1 << 31))):
        if mine.get(token) != theirs.get(token):
            raise CheckpointError(
                f"The draft model has another tokenizer than the target: {token!r} is {_named(mine.get(token))} in {files[0]} and "
                f"{_named(theirs.get(token))} in {files[1]}. A standalone draft needs the target's tokenizer.",
                field="tokenizer",
            )
    return True


def _vocabulary(raw: Mapping[str, Any]) -> dict[str, int]:
    """Return token → id of a ``tokenizer.json``; Unigram vocabularies are lists of (token, score)."""
    vocabulary = (raw.get("model") or {}).get("vocab") or {}
    tokens = dict(vocabulary) if isinstance(vocabulary, Mapping) else {entry[0]: index for index, entry in enumerate(vocabulary)}
    return tokens | {added["content"]: added["id"] for added in raw.get("added_tokens") or []}


def _named(token_id: int | None) -> str:
    return "absent" if token_id is None else f"id {token_id}"
