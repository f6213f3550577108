"""Compares the embedding and lm_head in the folder of MTP layers with the target's embedding and lm_head.

Drafting uses the target's tensors. The folder of the MTP layers contains copies of the tensors with which the
layers were trained. If these copies differ from the target's tensors, the layers were trained for another
model or another fine-tuning of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.services.draft.strategies.mtp_layers import MtpWeights
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader, is_weight
from outrider.shared.nn.decoder import EMBEDDING, LM_HEAD

SAMPLED_ROWS = 512
SAME = 0.99
"""Mean cosine from which two tensors count as equal. Copies in another data type are not exactly equal."""
COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": LM_HEAD}
"""Name of a copy in an MTP layer → name of the target's tensor."""


@dataclass(frozen=True, slots=True)
class ComparedCopy:
    """A copy of a target tensor in the folder of MTP layers, and its similarity to that tensor.

    Attributes:
        name: Name of the copy in the folder of the MTP layers.
        original: Name of the tensor in the target's folder.
        likeness: Mean cosine similarity of sampled rows; 0 if the shapes differ.
    """

    name: str
    original: str
    likeness: float

    @property
    def same(self) -> bool:
        """True if the tensor equals the target's."""
        return self.likeness > SAME

    @property
    def warning(self) -> str:
        """The warning if the copy differs."""
        return (
            f"differs from the target's {self.original} (mean cosine {self.likeness:.2f}): the MTP layers "
            "belong to another model or to another fine-tuning. Drafting uses the target's tensor"
        )


def compare_copies(mtp: MtpWeights, folder: Path, target: Path) -> list[ComparedCopy]:
    """Compare the tensors that MTP layers share with the target.

    Args:
        mtp: The MTP layers.
        folder: The folder of the layers. If it contains a complete model other than the target, the embedding
            of that model is compared too.
        target: The target's folder.

    Raises:
        CheckpointError: A folder cannot be read.
    """
    with CheckpointReader(folder) as draft, CheckpointReader(target) as reader:
        return list(_compared(mtp, draft, reader, folder.resolve() != target.resolve()))


def _compared(
    mtp: MtpWeights, draft: CheckpointReader, target: CheckpointReader, apart: bool
) -> Iterator[ComparedCopy]:
    pairs = {f"{prefix}{copy}": original for prefix in mtp.prefixes for copy, original in COPIES.items()}
    if apart:
        pairs |= {name: name for name in COPIES.values()}
    for name, original in pairs.items():
        stored = original if original in target.tensors else EMBEDDING  # a target with tied embeddings
        if name not in draft.tensors or stored not in target.tensors:
            continue
        mine, theirs = draft.tensors[name], target.tensors[stored]
        if not is_weight(mine.dtype) or not is_weight(theirs.dtype):
            continue
        likeness = _likeness(draft, name, target, stored) if mine.shape == theirs.shape else 0.0
        yield ComparedCopy(name, stored, likeness)


def _likeness(draft: CheckpointReader, name: str, target: CheckpointReader, original: str) -> float:
    rows = slice(0, None, max(1, draft.tensors[name].shape[0] // SAMPLED_ROWS))
    mine, theirs = (
        next(file for file in reader.files if tensor in file.tensors).read(tensor)[rows].float()
        for reader, tensor in ((draft, name), (target, original))
    )
    return float(torch.nn.functional.cosine_similarity(mine, theirs, dim=-1).mean())
