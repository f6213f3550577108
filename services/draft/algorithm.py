"""Which way of drafting is meant: as asked for, or as the checkpoint shows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from outrider.shared.base.errors import CheckpointError, ConfigurationError
from outrider.shared.nn.checkpoint.checkpoint_reader import CheckpointReader
from outrider.shared.spec.algorithm import FIELD, Algorithm, check_given

__all__ = ["Algorithm", "Choice", "check_given", "check_head", "check_restricted", "choose", "identify"]

HEAD_MARKS = (
    ".fc.weight",
    ".eagle_linear.weight",
    ".hidden_norm.weight",
    ".midlayer.self_attn.q_proj.weight",
)
"""Ends of tensor names that only draft heads have."""
MTP_MARKS = (".input_proj.weight", ".eh_proj.weight")
"""Ends of tensor names that only MTP layers have."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The way of drafting, and the folder that it reads; None where it reads none.

    Attributes:
        algorithm: EAGLE (any head), MTP, STANDALONE or NGRAM.
        folder: Of the head, the draft model, or the target whose MTP layers are meant.
        asked: What was asked for.
    """

    algorithm: Algorithm
    folder: Path | None
    asked: Algorithm

    def require_folder(self) -> Path:
        """Return the folder of a way of drafting that reads one."""
        assert self.folder is not None, f"{self.algorithm} reads a folder"
        return self.folder


def choose(asked: Algorithm, draft: Path | None, target_weights: Path | None) -> Choice:
    """Decide how to draft.

    Args:
        asked: `speculative_algorithm`.
        draft: Folder of a head or of a draft model, or None.
        target_weights: The target's folder, or None while unknown.

    Raises:
        ConfigurationError: the settings contradict each other or lack something; names the field and the fix.
        CheckpointError: a folder does not hold what was asked for.
    """
    check_given(asked, draft, target_weights)
    if asked is Algorithm.NGRAM:
        return Choice(Algorithm.NGRAM, None, asked)
    if draft is None:
        return Choice(Algorithm.MTP, _own_layers(target_weights), asked)
    found = identify(draft)
    if asked is Algorithm.AUTO:
        return Choice(found, draft, asked)
    if asked in (Algorithm.MTP, Algorithm.NEXTN):
        if found is not Algorithm.MTP:
            raise CheckpointError(
                f"{draft} holds no MTP layers; give the folder of a model that was published with them.",
                field=FIELD,
            )
        return Choice(Algorithm.MTP, draft, asked)
    if asked is Algorithm.STANDALONE:
        if found is Algorithm.EAGLE:
            raise CheckpointError(
                f"{draft} is a draft head, not a model of its own: ask for EAGLE or EAGLE3, or give a small model.",
                field=FIELD,
            )
        return Choice(Algorithm.STANDALONE, draft, asked)
    if found is Algorithm.STANDALONE:
        raise CheckpointError(
            f"{draft} is a model of its own, not an {asked.value} head: ask for STANDALONE, or give a head.",
            field=FIELD,
        )
    if found is Algorithm.MTP and asked is Algorithm.EAGLE3:
        raise CheckpointError(
            f"{draft} holds MTP layers, not an EAGLE3 head: ask for MTP, or give a head.", field=FIELD
        )
    return Choice(found, draft, asked)


def check_head(choice: Choice, algorithm: str) -> None:
    """Check that a loaded head is of the kind that was asked for.

    Raises:
        CheckpointError: names both.
    """
    if choice.asked in (Algorithm.EAGLE, Algorithm.EAGLE3) and choice.asked.value != algorithm:
        raise CheckpointError(
            f"{choice.folder} is a head of {algorithm}, and {choice.asked.value} was asked for: set --speculative-algorithm {algorithm}.",
            field=FIELD,
        )


def check_restricted(choice: Choice, token_map: Path | None) -> None:
    """Check that what drafts has a vocabulary which a token map can cut.

    Raises:
        ConfigurationError: it has none.
    """
    if token_map is not None and choice.algorithm is Algorithm.NGRAM:
        raise ConfigurationError(
            "speculative_token_map: NGRAM has no vocabulary of its own; leave it out.",
            field="speculative_token_map",
        )


def identify(folder: Path) -> Algorithm:
    """Return what a checkpoint is good for, by the names of its tensors: EAGLE (a head), MTP (a model with MTP layers) or STANDALONE.

    Raises:
        CheckpointError: the folder or its files cannot be read.
    """
    with CheckpointReader(folder) as reader:
        names = list(reader.names)
    if _any_ends(names, MTP_MARKS):
        return Algorithm.MTP
    return Algorithm.EAGLE if _any_ends(names, HEAD_MARKS) else Algorithm.STANDALONE


def _own_layers(target_weights: Path | None) -> Path:
    """Return the target's folder, if it holds MTP layers: what an algorithm means that was given no draft."""
    assert target_weights is not None, "check_given"
    if identify(target_weights) is not Algorithm.MTP:
        raise ConfigurationError(
            f"draft: is missing, and {target_weights} holds no MTP layers that could draft instead: give a head by --draft, or ask for "
            "--speculative-algorithm NGRAM.",
            field="draft",
        )
    return target_weights


def _any_ends(names: Collection[str], ends: tuple[str, ...]) -> bool:
    return any(f".{name}".endswith(ends) for name in names)
