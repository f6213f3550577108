"""The ways of drafting, by name; what can be said of them without looking at a checkpoint. Imports no torch: the launcher reads it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from outrider.shared.base.errors import ConfigurationError

FIELD = "speculative_algorithm"
TOKEN_MAP_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".json")
"""Of the files that `speculative_token_map` may name."""


class Algorithm(Enum):
    """How drafts are made; AUTO is what the checkpoint shows. Names as SGLang's; upper or lower case."""

    AUTO = "auto"
    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    MTP = "MTP"
    NEXTN = "NEXTN"
    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"
    NONE = "NONE"

    @classmethod
    def _missing_(cls, value: object) -> Algorithm | None:
        return next(
            (member for member in cls if isinstance(value, str) and member.value.lower() == value.lower()),
            None,
        )

    @property
    def needs_draft(self) -> bool:
        """Whether something must be given to draft with: the others need nothing, or find it in the target's checkpoint."""
        return self in (Algorithm.AUTO, Algorithm.STANDALONE)


def check_given(asked: Algorithm, draft: Path | None, target_weights: Path | None) -> None:
    """Check what needs no look at the folders.

    Raises:
        ConfigurationError: as `choose`.
    """
    if asked is Algorithm.NONE:
        raise ConfigurationError(
            f"{FIELD}: NONE means decoding without a draft; do not start one.", field=FIELD
        )
    if asked is Algorithm.NGRAM and draft is not None:
        raise ConfigurationError(
            f"draft: NGRAM drafts without a model, so {draft} would not be used; leave --draft out.",
            field="draft",
        )
    if asked is Algorithm.STANDALONE and draft is None:
        raise ConfigurationError(
            "draft: STANDALONE needs a draft model: give the folder of a small model with the target's tokenizer by --draft.",
            field="draft",
        )
    if asked is Algorithm.EAGLE3 and draft is None:
        raise ConfigurationError(
            "draft: EAGLE3 needs a head: give its folder by --draft; or ask for MTP, if the target's own MTP layers shall draft.",
            field="draft",
        )
    if draft is None and target_weights is None and asked is not Algorithm.NGRAM:
        raise ConfigurationError(
            "draft: is missing. Give the folder of a head or of a draft model by --draft; or the target's by --target-weights, if its own "
            "MTP layers shall draft; or ask for --speculative-algorithm NGRAM.",
            field="draft",
        )
