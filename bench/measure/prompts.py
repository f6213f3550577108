"""Reads prompts from JSON-lines files, such as the embedded held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.shared.base.errors import ConfigurationError

HELDOUT_PROMPTS = Path(__file__).resolve().parents[1] / "prompts" / "heldout.jsonl"

Messages = list[dict[str, str]]


def load_prompts(path: Path, count: int) -> list[Messages]:
    """Read the first `count` prompts of a JSON-lines file. Each line has a field ``messages`` or ``prompt``.

    Raises:
        ConfigurationError: The file is missing or too short, or a line has neither field.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigurationError(
            f"Cannot read the prompts {path}: {error.strerror}.", field="--prompts"
        ) from None
    if len(lines) < count:
        raise ConfigurationError(
            f"{path} contains {len(lines)} prompts, fewer than --num-prompts {count}.", field="--num-prompts"
        )
    return [
        _messages(json.loads(line), f"{path}:{number}") for number, line in enumerate(lines[:count], start=1)
    ]


def _messages(record: dict[str, Any], where: str) -> Messages:
    if "messages" in record:
        return [
            {"role": str(message["role"]), "content": str(message["content"])}
            for message in record["messages"]
        ]
    if "prompt" in record:
        return [{"role": "user", "content": str(record["prompt"])}]
    raise ConfigurationError(f"{where} has neither `messages` nor `prompt`.", field="--prompts")
