"""Whether two model folders speak the same token ids."""

from __future__ import annotations

from pathlib import Path

from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.tokenizer_file import TOKENIZER_FILE, read_vocabulary


def check_same_tokenizer(draft: Path, target: Path) -> bool:
    """Compare the vocabularies of two ``tokenizer.json``, added tokens included.

    Returns:
        Whether they could be compared: False when a folder has none.

    Raises:
        CheckpointError: they differ; names the first token that does.
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
        f"The draft has another tokenizer than the target: {token!r} is {_named(mine.get(token))} in {files[0]} and "
        f"{_named(theirs.get(token))} in {files[1]}. Serve the target that this draft was made for, or another --draft; if only the "
        "draft's file is stale, remove it.",
        field="tokenizer",
    )


def _named(token_id: int | None) -> str:
    return "absent" if token_id is None else f"id {token_id}"
