"""Compares the tokenizers of a draft and a target folder, which must give each token the same id."""

from __future__ import annotations

from pathlib import Path

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.tokenizer_file import TOKENIZER_FILE, read_vocabulary


def check_same_tokenizer(draft: Path, target: Path) -> bool:
    """Compare the vocabularies of two ``tokenizer.json`` files, including added tokens.

    Returns:
        True if the vocabularies are equal; False if one of the folders has no tokenizer.

    Raises:
        CheckpointError: The vocabularies differ. The message names the differing token with the lowest id.
    """
    files = (draft / TOKENIZER_FILE, target / TOKENIZER_FILE)
    if files[0].resolve() == files[1].resolve():
        return files[0].is_file()
    mine = read_vocabulary(draft)
    theirs = read_vocabulary(target) if mine is not None else None
    if mine is None or theirs is None:
        return False
    if mine == theirs:
        return True
    different = (token for token in mine.keys() | theirs.keys() if mine.get(token) != theirs.get(token))
    token = min(
        different, key=lambda token: (min(mine.get(token, 1 << 31), theirs.get(token, 1 << 31)), token)
    )
    raise CheckpointError(
        f"The draft and the target have different tokenizers: {token!r} is {_named(mine.get(token))} in "
        f"{files[0]} and {_named(theirs.get(token))} in {files[1]}. Serve the target that this draft was "
        "made for, or give another --draft. If only the draft's file is outdated, remove it.",
        field="tokenizer",
    )


def _named(token_id: int | None) -> str:
    return "absent" if token_id is None else f"id {token_id}"
