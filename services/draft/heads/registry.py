"""Loads a folder's draft head. Detects EAGLE or EAGLE-3 by architecture name or, if ambiguous, by tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

import torch

from outrider.services.draft.growth.recurrent_head import RecurrentHead
from outrider.services.draft.heads.eagle import EagleHead
from outrider.services.draft.heads.eagle3 import Eagle3Head
from outrider.services.draft.heads.files import mistral_format
from outrider.services.draft.heads.files.head_config import flatten
from outrider.services.draft.heads.files.keys import HeadKeys
from outrider.services.draft.heads.files.mistral_format import config_file, read_head_config
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.nn.config.model_config import ConfigReader
from outrider.shared.obs.logging import get_logger

log = get_logger("outrider.draft.heads")

Loader = Callable[[Path, torch.device, torch.dtype, torch.Tensor | None], RecurrentHead]


class HeadKind(Enum):
    """The kinds of heads. The values are the names of the algorithms in the settings."""

    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"


FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "GptOss")
"""Families of targets that appear in the architecture names of heads. The heads of all families have Llama's
layers."""
ARCHITECTURES: Mapping[str, HeadKind] = {
    **{
        name: HeadKind.EAGLE
        for one in FAMILIES
        for name in (f"{one}ForCausalLMEagle", f"Eagle{one}ForCausalLM")
    },
    **{
        name: HeadKind.EAGLE3
        for one in FAMILIES
        for name in (f"{one}ForCausalLMEagle3", f"Eagle3{one}ForCausalLM")
    },
    "Eagle3Qwen2_5vlForCausalLM": HeadKind.EAGLE3,
    "Eagle3Qwen3vlForCausalLM": HeadKind.EAGLE3,
    "Eagle3MiniMaxM2ForCausalLM": HeadKind.EAGLE3,
    "Eagle3Speculator": HeadKind.EAGLE3,
    "Eagle3DraftModel": HeadKind.EAGLE3,
    "Eagle3DeepseekV2ForCausalLM": HeadKind.EAGLE3,
    "Eagle3DeepseekV3ForCausalLM": HeadKind.EAGLE3,
    "LlamaForCausalLMEagle3Deep": HeadKind.EAGLE3,  # ModelOpt's heads with several layers
}
PLAIN_ARCHITECTURES = tuple(f"{one}ForCausalLM" for one in FAMILIES)
"""Architecture names that official heads share with plain models. The tensors decide whether a checkpoint is
a head."""

FUSION = "fc.weight"
EAGLE3_ONLY = ".hidden_norm.weight"


def head_kind(path: Path) -> HeadKind | None:
    """Return the kind of head in a checkpoint folder, or None if the folder contains a plain model.

    Raises:
        CheckpointError: The folder contains neither a head nor a plain model. The `field` of the error names
            the key or file.
    """
    raw = read_head_config(path)
    source = config_file(path)
    said = ConfigReader(flatten({"architectures": raw.get("architectures")}, source), source).strings(
        "architectures"
    )
    architecture = (said or PLAIN_ARCHITECTURES)[0]
    kind = ARCHITECTURES.get(architecture)
    if kind is not None:
        return kind
    if architecture not in PLAIN_ARCHITECTURES:
        known = ", ".join((*ARCHITECTURES, *PLAIN_ARCHITECTURES))
        raise CheckpointError(
            f"{config_file(path)}: architectures: {architecture!r} is not a supported draft head. "
            f"Supported names: {known}.",
            field="architectures",
        )
    with CheckpointReader(path) as reader:
        names = [name.removeprefix("model.") for name in reader.names]
    if FUSION not in names and mistral_format.FUSION not in names:
        return None
    return HeadKind.EAGLE3 if any(name.endswith(EAGLE3_ONLY) for name in names) else HeadKind.EAGLE


def load_head(
    path: Path, device: torch.device, dtype: torch.dtype, token_map: torch.Tensor | None = None
) -> RecurrentHead:
    """Load the draft head in a checkpoint folder.

    Args:
        path: Folder of the head.
        device, dtype: Device and dtype to compute with.
        token_map: The target ids that a head with a full vocabulary may draft (`token_map.read_token_map`).
            With None, the head drafts all ids.

    Raises:
        CheckpointError: The folder contains no supported head. The `field` of the error names the key, file
            or tensor.
    """
    kind = head_kind(path)
    if kind is None:
        raise CheckpointError(
            f"{path} has no tensor {FUSION}, so it is a plain model and not a draft head. Give the folder of "
            "a head, or draft with this model by --speculative-algorithm STANDALONE.",
            field=FUSION,
        )
    return LOADERS[kind](path, device, dtype, token_map)


def _load_eagle(
    path: Path, device: torch.device, dtype: torch.dtype, token_map: torch.Tensor | None
) -> RecurrentHead:
    head, keys = EagleHead.load(path, device, dtype, token_map)
    _log(head, keys, features="last hidden state, after the norm", rope_theta=head.config.layer.rope.theta)
    return head


def _load_eagle3(
    path: Path, device: torch.device, dtype: torch.dtype, token_map: torch.Tensor | None
) -> RecurrentHead:
    head, keys = Eagle3Head.load(path, device, dtype, token_map)
    aux = "none: the last hidden state" if head.config.final_hidden else head.config.aux.summary
    _log(head, keys, aux_layers=aux, rope_theta=head.config.layer.rope.theta)
    return head


def _log(head: RecurrentHead, keys: HeadKeys, **more: object) -> None:
    log.info(
        "draft head loaded",
        algorithm=head.algorithm,
        layer_names=keys.dialect,
        layers=head.num_layers,
        draft_vocab_size=head.vocabulary.size,
        ignored=dict(keys.ignored),
        **more,
    )


LOADERS: Mapping[HeadKind, Loader] = {HeadKind.EAGLE: _load_eagle, HeadKind.EAGLE3: _load_eagle3}
