"""Looks for a snapshot in the Hugging Face cache, and lists the files that it still needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "tokenizer*", "merges.txt", "vocab.txt")
CONFIGS = ("config.json", "params.json")
"""Names of a model's configuration. Mistral publishes draft heads with ``params.json``."""
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
SHARD = "*-of-*"


def wanted_files(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Choose the files of a model repository that the services read.

    The weights are safetensors files. ``.bin`` files are chosen only if the repository has no safetensors
    files. The loader reads ``.bin`` files without executing code from them. Mistral's ``consolidated`` copies
    of the weights are left out if the usual weight files exist. Files in subfolders are never chosen.

    Args:
        names: Names of all files in the repository.

    Returns:
        (configuration and tokenizer files, weight files), both sorted.
    """
    top = sorted(name for name in names if "/" not in name)
    weights = [name for name in top if name.endswith(".safetensors")]
    usual = [name for name in weights if not name.startswith("consolidated")]
    if not weights:
        usual = [name for name in top if fnmatchcase(name, "pytorch_model*.bin")]
    small = [name for name in top if any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)]
    chosen = usual or weights
    return [name for name in small if name not in chosen], chosen


def missing_file(folder: Path) -> str:
    """Return the name of a file that a model snapshot lacks, or an empty string if no file is missing.

    A snapshot is incomplete after an interrupted download. A symbolic link whose destination is gone counts
    as missing.
    """
    if not any((folder / name).is_file() for name in CONFIGS):
        return CONFIGS[0]
    for name in INDEXES:
        if (folder / name).is_file():
            return next((shard for shard in _shards(folder / name) if not (folder / shard).is_file()), "")
    if any((folder / name).is_file() for name in SINGLE_FILES):
        return ""
    others = [path.name for path in folder.glob("*.safetensors") if path.is_file()]
    # Shards are useless without the index that lists them.
    return "" if others and not any(fnmatchcase(name, SHARD) for name in others) else SINGLE_FILES[0]


def _shards(index: Path) -> list[str]:
    """Return the shards in an index; none if it is damaged, because opening the model reports that."""
    try:
        listed = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        return sorted({str(name) for name in listed.values()})
    except (OSError, ValueError, AttributeError):
        return []
