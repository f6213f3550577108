"""Chooses the drafting algorithm (EAGLE, MTP, standalone or n-gram) from the settings and the checkpoints.

With the setting ``speculative_algorithm`` at ``auto``, `identify` infers the algorithm from the names of the
tensors in the draft's checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.spec.algorithm import FIELD, Algorithm, check_given

__all__ = [
    "Algorithm",
    "Choice",
    "check_given",
    "check_head",
    "check_token_map_use",
    "choose_algorithm",
    "identify",
]

HEAD_MARKS = (
    ".fc.weight",
    ".eagle_linear.weight",
    ".hidden_norm.weight",
    ".midlayer.self_attn.q_proj.weight",
)
"""Suffixes of tensor names that occur only in draft heads."""
MTP_MARKS = (".input_proj.weight", ".eh_proj.weight")
"""Suffixes of tensor names that occur only in MTP layers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafting algorithm that `choose_algorithm` returns, and the checkpoint folder that it reads.

    Attributes:
        algorithm: The drafting algorithm: EAGLE (any kind of head), MTP, STANDALONE or NGRAM.
        folder: Folder of the head or of the draft model. For MTP, the folder of the target. None for NGRAM.
        configured: The algorithm that the settings name, possibly ``auto``.
    """

    algorithm: Algorithm
    folder: Path | None
    configured: Algorithm

    def require_folder(self) -> Path:
        """Return the folder. Call this method only for an algorithm that reads a folder."""
        assert self.folder is not None, f"{self.algorithm} reads a folder"
        return self.folder


def choose_algorithm(configured: Algorithm, draft: Path | None, target_weights: Path | None) -> Choice:
    """Choose the drafting algorithm, and check that the given checkpoint folders suit this algorithm.

    Args:
        configured: The setting `speculative_algorithm`.
        draft: Folder of a head or of a draft model. None if the settings name no such folder.
        target_weights: Folder of the target's checkpoint. None if the folder is not known yet.

    Raises:
        ConfigurationError: The settings contradict each other or are incomplete. The message names the field
            and the fix.
        CheckpointError: A folder does not contain the kind of model that the settings require.
    """
    check_given(configured, draft, target_weights)
    if configured is Algorithm.NGRAM:
        return Choice(Algorithm.NGRAM, None, configured)
    if draft is None:
        return Choice(Algorithm.MTP, _own_layers(target_weights), configured)
    found = identify(draft)
    if configured is Algorithm.AUTO:
        return Choice(found, draft, configured)
    if configured in (Algorithm.MTP, Algorithm.NEXTN):
        if found is not Algorithm.MTP:
            raise CheckpointError(
                f"{draft} contains no MTP layers. Give the folder of a model that was published with them.",
                field=FIELD,
            )
        return Choice(Algorithm.MTP, draft, configured)
    if configured is Algorithm.STANDALONE:
        if found is Algorithm.EAGLE:
            raise CheckpointError(
                f"{draft} is a draft head, not a standalone model. Set EAGLE or EAGLE3, or give a small "
                "model.",
                field=FIELD,
            )
        return Choice(Algorithm.STANDALONE, draft, configured)
    if found is Algorithm.STANDALONE:
        raise CheckpointError(
            f"{draft} is a standalone model, not an {configured.value} head. Set STANDALONE, or give a head.",
            field=FIELD,
        )
    if found is Algorithm.MTP and configured is Algorithm.EAGLE3:
        raise CheckpointError(
            f"{draft} contains MTP layers, not an EAGLE3 head. Set MTP, or give a head.", field=FIELD
        )
    return Choice(found, draft, configured)


def check_head(choice: Choice, algorithm: str) -> None:
    """Check that a loaded head is of the configured kind.

    Raises:
        CheckpointError: The kinds differ. The message names both kinds.
    """
    if choice.configured in (Algorithm.EAGLE, Algorithm.EAGLE3) and choice.configured.value != algorithm:
        raise CheckpointError(
            f"{choice.folder} is an {algorithm} head, not an {choice.configured.value} head. "
            f"Set --speculative-algorithm {algorithm}.",
            field=FIELD,
        )


def check_token_map_use(choice: Choice, token_map: Path | None) -> None:
    """Check that the chosen drafting algorithm can use the FR-Spec token map, if a token map is given.

    Raises:
        ConfigurationError: The algorithm is NGRAM, which has no vocabulary of its own.
    """
    if token_map is not None and choice.algorithm is Algorithm.NGRAM:
        raise ConfigurationError(
            "speculative_token_map: NGRAM has no vocabulary of its own. Leave out --speculative-token-map.",
            field="speculative_token_map",
        )


def identify(folder: Path) -> Algorithm:
    """Return the drafting algorithm of a checkpoint, judged by the names of its tensors.

    The result is EAGLE for a head, MTP for a model with MTP layers, and STANDALONE for any other model.

    Raises:
        CheckpointError: The folder of the checkpoint, or a file in it, cannot be read.
    """
    with CheckpointReader(folder) as reader:
        names = list(reader.names)
    if _any_ends(names, MTP_MARKS):
        return Algorithm.MTP
    return Algorithm.EAGLE if _any_ends(names, HEAD_MARKS) else Algorithm.STANDALONE


def _own_layers(target_weights: Path | None) -> Path:
    """Return the target's folder, from which MTP layers are loaded. Raise if there are no MTP layers."""
    assert target_weights is not None, "check_given"
    if identify(target_weights) is not Algorithm.MTP:
        raise ConfigurationError(
            f"draft: none is given, and {target_weights} contains no MTP layers that could draft instead. "
            "Give a head by --draft, or set --speculative-algorithm NGRAM.",
            field="draft",
        )
    return target_weights


def _any_ends(names: Collection[str], ends: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(ends) for name in names)
