"""Finds the head that a checkpoint needs by the architecture that its configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.services.draft.heads.base import RecurrentHead
from outrider.services.draft.heads.eagle3 import Eagle3Head
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config import CONFIG_FILE, read_json
from outrider.shared.obs.logging import get_logger

log = get_logger("outrider.draft.heads")

Loader = Callable[[Path, torch.device, torch.dtype], RecurrentHead]


def _load_eagle3(path: Path, device: torch.device, dtype: torch.dtype) -> RecurrentHead:
    head, keys = Eagle3Head.load(path, device, dtype)
    aux = head.config.aux_layer_ids
    log.info(
        "draft head read",
        algorithm=head.algorithm,
        layer_names=keys.dialect,
        draft_vocab_size=head.vocabulary.size,
        aux_layers=f"outputs of {list(aux)}" if aux else "default triple: outputs of 1, L//2 - 1, L - 4",
        rope_theta=head.config.layer.rope.theta,
        ignored=list(keys.ignored),
    )
    return head


LOADERS: Mapping[str, Loader] = {
    "LlamaForCausalLMEagle3": _load_eagle3,
    "Eagle3LlamaForCausalLM": _load_eagle3,
    "Eagle3Speculator": _load_eagle3,
    # The official checkpoints say only this, with a draft vocabulary; `load_head` looks at that.
    "LlamaForCausalLM": _load_eagle3,
}


def load_head(path: Path, device: torch.device, dtype: torch.dtype) -> RecurrentHead:
    """Load the head in a folder.

    Raises:
        CheckpointError: the folder is not a draft head of a known kind; `field` names the key, file or tensor.
    """
    raw = read_json(path / CONFIG_FILE)
    architecture = str((raw.get("architectures") or ["LlamaForCausalLM"])[0])
    loader = LOADERS.get(architecture)
    if loader is None:
        known = ", ".join(LOADERS)
        raise CheckpointError(
            f"{path / CONFIG_FILE}: architectures: {architecture!r} is not a known draft head; known: {known}.", field="architectures"
        )
    if architecture == "LlamaForCausalLM" and not _looks_like_eagle3(raw):
        raise CheckpointError(
            f"{path / CONFIG_FILE}: draft_vocab_size: is missing, so this is a plain model or an EAGLE-1/2 head; "
            "give the folder of an EAGLE-3 head.",
            field="draft_vocab_size",
        )
    return loader(path, device, dtype)


def _looks_like_eagle3(raw: Mapping[str, Any]) -> bool:
    return "draft_vocab_size" in raw or "eagle_config" in raw
