"""Converts a draft head's files to Outrider's own layout, or to the layout of the official EAGLE code.

The source head may have any supported layout. After writing the converted head, this module reads it with the
loader that the services use. If the loader fails, the written files are removed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.services.convert.config import eagle_config, outrider_config
from outrider.services.doctor.vocabulary_map import D2tMeaning, d2t_meaning
from outrider.services.draft.heads.eagle import EagleHead
from outrider.services.draft.heads.files.eagle3_config import Eagle3Config
from outrider.services.draft.heads.files.eagle3_keys import resolve
from outrider.services.draft.heads.files.keys import FIRST_LAYER, HeadKeys, read_scale
from outrider.services.draft.heads.files.mistral_format import config_file, read_head_config
from outrider.services.draft.heads.registry import HeadKind, head_kind, load_head
from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.config.model_config import CONFIG_FILE
from outrider.shared.obs.progress import Progress

HOST = torch.device("cpu")
WEIGHTS_FILE = "model.safetensors"
EAGLE3_FIRST_LAYER = "midlayer."


class HeadLayout(Enum):
    """Layout of the files of a converted head.

    Attributes:
        OUTRIDER: Tensors are named ``layers.N.*``. This layout supports every feature of a head.
        EAGLE: Tensors are named ``midlayer.*``. This layout supports only the official EAGLE code's features.
    """

    OUTRIDER = "outrider"
    EAGLE = "eagle"


@dataclass(frozen=True, slots=True)
class Converted:
    """Summary of the conversion of a draft head.

    Attributes:
        algorithm: Drafting algorithm of the head.
        tensors: Number of tensors written.
        notes: One note for each tensor or key that was left out or changed, with the reason.
    """

    algorithm: str
    tensors: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored draft head that is to be converted.

    Attributes:
        kind: Kind of the head.
        tensors: Canonical tensor name → tensor.
        ignored: Stored name of each tensor that is left out → the reason.
        raw: The content of the head's config.json.
    """

    kind: HeadKind
    tensors: dict[str, torch.Tensor]
    ignored: Mapping[str, str]
    raw: Mapping[str, Any]


def rewrite_head(source: Path, destination: Path, layout: HeadLayout) -> Converted:
    """Rewrite the draft head in a folder.

    Args:
        source: Folder of the head: safetensors or ``.bin`` files in any supported layout.
        destination: Folder to write. It is created if needed and must be empty.
        layout: Layout to write.

    Raises:
        CheckpointError: The source is not a readable head, or the head needs a feature that the layout does
            not support. The message names the key or tensor.
        ConfigurationError: The destination is not empty.
    """
    kind = head_kind(source)
    if kind is None:
        raise CheckpointError(
            f"{source} is a plain model, not a draft head, so there is nothing to convert.", field=str(source)
        )
    if kind not in _READERS:
        raise CheckpointError(
            f"{source}: heads of kind {kind.value} have only one layout, so there is nothing to convert.",
            field="architectures",
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigurationError(
            f"{destination} already exists and is not empty. Give a new folder.", field=str(destination)
        )
    stored = _read(source, kind)
    notes = [f"left out {name}: {reason}" for name, reason in stored.ignored.items()]
    if "d2t" in stored.tensors:
        notes += _settle_vocabulary(source, stored)
    config = CONFIGS[layout](stored.raw, config_file(source), kind, stored.tensors)
    tensors = {_spell(name, kind, layout): tensor.contiguous() for name, tensor in stored.tensors.items()}
    _write(destination, config, tensors)
    return Converted(kind.value, len(tensors), tuple(notes))


def _read(source: Path, kind: HeadKind) -> _Source:
    with CheckpointReader(source) as reader:
        keys = _READERS[kind](source, reader)
        files = {name: file for file in reader.files for name in file.tensors}
        tensors: dict[str, torch.Tensor] = {}
        with Progress("reading tensors", len(keys.actual)) as progress:
            for name, actual in keys.actual.items():
                scale = read_scale(reader, keys.scales[name]) if name in keys.scales else None
                # Clone the tensors, because they must stay valid after the source files are unmapped.
                tensors[name] = keys.adapt(name, files[actual].read(actual).clone(), scale)
                if scale is not None:
                    tensors[name] = tensors[name].to(torch.bfloat16)
                progress.advance()
    return _Source(kind, tensors, keys.ignored, read_head_config(source))


def _eagle_keys(source: Path, reader: CheckpointReader) -> HeadKeys:
    return EagleHead.load(source, HOST, torch.float32)[1]


def _eagle3_keys(source: Path, reader: CheckpointReader) -> HeadKeys:
    # Do not load the vocabulary map. Loading refuses a d2t that stores target ids, which this command
    # rewrites.
    return resolve(reader, Eagle3Config.from_dir(source))


_READERS: Mapping[HeadKind, Callable[[Path, CheckpointReader], HeadKeys]] = {
    HeadKind.EAGLE: _eagle_keys,
    HeadKind.EAGLE3: _eagle3_keys,
}
CONFIGS: Mapping[
    HeadLayout, Callable[[Mapping[str, Any], Path, HeadKind, Mapping[str, torch.Tensor]], dict[str, Any]]
] = {
    HeadLayout.OUTRIDER: outrider_config,
    HeadLayout.EAGLE: eagle_config,
}


def _settle_vocabulary(source: Path, stored: _Source) -> list[str]:
    """Rewrite the vocabulary maps of a head: ``d2t`` as int64 offsets, and ``t2d`` as the matching mask.

    If the head's lm_head has the full vocabulary, only the rows of the draft vocabulary are kept.

    Returns:
        Notes about the changes.
    """
    tensors, notes = stored.tensors, []
    target_size = Eagle3Config.from_dir(source).layer.vocab_size
    values = tensors["d2t"].to(torch.int64)
    draft_ids = torch.arange(values.shape[0])
    meaning = d2t_meaning(values, tensors.get("t2d"), target_size)
    if meaning is D2tMeaning.NEITHER:
        raise CheckpointError(
            f"{source}: d2t contains neither offsets nor token ids below {target_size}, or it contradicts "
            "t2d. Export the head again.",
            field="d2t",
        )
    if meaning is D2tMeaning.TARGET_IDS:
        values = values - draft_ids
        notes.append("d2t contained target ids; written as offsets")
    ids = values + draft_ids
    tensors["d2t"] = values
    tensors["t2d"] = torch.zeros(target_size, dtype=torch.bool).index_fill_(0, ids, True)
    head = tensors.get("lm_head.weight")
    if head is not None and head.shape[0] != ids.shape[0]:
        tensors["lm_head.weight"] = head[ids]
        notes.append(
            f"lm_head.weight reduced from {head.shape[0]} rows to the {ids.shape[0]} rows of the draft "
            "vocabulary"
        )
    return notes


def _spell(name: str, kind: HeadKind, layout: HeadLayout) -> str:
    if layout is HeadLayout.EAGLE and kind is HeadKind.EAGLE3 and name.startswith(FIRST_LAYER):
        return EAGLE3_FIRST_LAYER + name.removeprefix(FIRST_LAYER)
    return name


def _write(destination: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    made = not destination.exists()
    destination.mkdir(parents=True, exist_ok=True)
    try:
        with Progress("writing the head", 2, counts=False) as progress:
            save_file(dict(tensors), destination / WEIGHTS_FILE, metadata={"format": "pt"})
            (destination / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            progress.advance(step="checking")
            load_head(destination, HOST, torch.float32)
    except BaseException:
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (destination / name).unlink(missing_ok=True)
        if made:
            shutil.rmtree(destination, ignore_errors=True)
        raise
