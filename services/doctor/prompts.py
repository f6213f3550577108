"""Reads the prompts of a probe and encodes them as token ids of the target."""

from __future__ import annotations

import json
import random
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.services.gateway.tokenizer import TOKENIZER_FILE, TextCodec
from outrider.shared.base.errors import ConfigurationError

BUILT_IN = Path(str(files("outrider.bench"))) / "prompts" / "heldout.jsonl"
FIELD = "--prompts"
MADE_UP_LEN = 32


def read_prompts(file: Path | None, target: Path, vocab_size: int, count: int) -> list[tuple[int, ...]]:
    """Return up to `count` prompts as token ids.

    Args:
        file: JSON lines file. Each line has a field ``prompt``, ``messages`` or ``prompt_ids``. None uses the
            built-in prompts.
        target: Folder of the target, with the tokenizer. Without a tokenizer and without `file`, the prompts
            are random token ids.
        vocab_size: Vocabulary size of the target.
        count: Maximum number of prompts.

    Raises:
        ConfigurationError: The file cannot be read, or a line has none of the three fields.
        CheckpointError: Text must be encoded, but the tokenizer is missing or broken.
    """
    if file is None and not (target / TOKENIZER_FILE).is_file():
        return _made_up(vocab_size, count)
    source = file or BUILT_IN
    try:
        lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
        rows = [json.loads(line) for line in lines]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{source} cannot be read as JSON lines: {error}.", field=FIELD) from error
    if not rows:
        raise ConfigurationError(f"{source} contains no prompts.", field=FIELD)
    codec = (
        TextCodec.load(target)
        if any(not isinstance(row, dict) or "prompt_ids" not in row for row in rows)
        else None
    )
    return [_encode(row, codec, vocab_size, f"{source}:{number}") for number, row in enumerate(rows, start=1)]


def _encode(row: Any, codec: TextCodec | None, vocab_size: int, where: str) -> tuple[int, ...]:
    if isinstance(row, dict) and "prompt_ids" in row:
        ids = row["prompt_ids"]
        if (
            not isinstance(ids, list)
            or not ids
            or not all(isinstance(token, int) and 0 <= token < vocab_size for token in ids)
        ):
            raise ConfigurationError(
                f"{where}: prompt_ids must list token ids below {vocab_size}.", field=FIELD
            )
        return tuple(ids)
    if not isinstance(row, dict) or codec is None or not ("prompt" in row or "messages" in row):
        raise ConfigurationError(f"{where} needs `prompt`, `messages` or `prompt_ids`.", field=FIELD)
    if codec.template is None:
        return codec.encode(row["prompt"] if "prompt" in row else row["messages"][-1]["content"])
    return codec.encode_chat(
        row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}], {}
    )


def _made_up(vocab_size: int, count: int) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    return [tuple(draw.randrange(vocab_size) for _ in range(MADE_UP_LEN)) for _ in range(count)]
