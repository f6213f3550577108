"""Damages copies of model folders: edits config.json, tensors, safetensors headers and tokenizers."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS_FILE = "model.safetensors"


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json. A value of None removes the key."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of the weights file. `change` edits its argument in place."""
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def edit_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the safetensors header and leave the data after it unchanged."""
    file = folder / WEIGHTS_FILE
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def put(tensors: dict[str, torch.Tensor], name: str, value: float) -> None:
    """Set the fourth number of a tensor."""
    tensors[name].view(-1)[3] = value


def overlap(header: dict[str, Any]) -> None:
    """Move the data of a tensor four bytes into the data of the previous tensor."""
    first, second = sorted(
        (name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"]
    )[1:3]
    begin, end = header[second]["data_offsets"]
    header[second]["data_offsets"] = [begin - 4, end - 4]
    header["__metadata__"] = {"first": first}


def truncate(folder: Path) -> None:
    """Cut off the last 100 bytes of the weights file."""
    file = folder / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])


def pickle_code(folder: Path) -> None:
    """Replace the weights file by a pickle that refers to code."""
    (folder / WEIGHTS_FILE).unlink()
    torch.save({"fc.weight": subprocess.Popen}, folder / "pytorch_model.bin")


def set_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    """Write a tokenizer.json with this vocabulary."""
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []})
    )
