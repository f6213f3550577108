"""Names of the draft algorithms, and the checks of draft settings that need no checkpoint.

This module does not import torch, because the launcher imports this module.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from outrider.shared.base.errors import ConfigurationError

FIELD = "speculative_algorithm"
TOKEN_MAP_SUFFIXES = (".pt", ".pth", ".bin", ".safetensors", ".json")
"""File types that `speculative_token_map` may name."""


class Algorithm(Enum):
    """Draft algorithms. Their names are those of SGLang, in upper or lower case.

    AUTO selects the algorithm that fits the checkpoint.
    """

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
        """True if the algorithm requires a folder with a draft model.

        Other algorithms use no draft model, or use layers of the target's own checkpoint.
        """
        return self in (Algorithm.AUTO, Algorithm.STANDALONE)


def check_given(asked: Algorithm, draft: Path | None, target_weights: Path | None) -> None:
    """Check the draft settings, as far as this is possible without reading the model folders.

    Raises:
        ConfigurationError: The settings contradict each other, or a setting is missing. The message names the
            setting.
    """
    if asked is Algorithm.NONE:
        raise ConfigurationError(
            f"{FIELD}: NONE means decoding without a draft. Do not start a draft service.", field=FIELD
        )
    if asked is Algorithm.NGRAM and draft is not None:
        raise ConfigurationError(
            f"draft: NGRAM drafts without a model, so {draft} would not be used. Remove --draft.",
            field="draft",
        )
    if asked is Algorithm.STANDALONE and draft is None:
        raise ConfigurationError(
            "draft: STANDALONE needs a draft model. Pass the folder of a small model with the target's "
            "tokenizer as --draft.",
            field="draft",
        )
    if asked is Algorithm.EAGLE3 and draft is None:
        raise ConfigurationError(
            "draft: EAGLE3 needs a head. Pass its folder as --draft, or select MTP to draft with the "
            "target's own MTP layers.",
            field="draft",
        )
    if draft is None and target_weights is None and asked is not Algorithm.NGRAM:
        raise ConfigurationError(
            "draft: is missing. Pass the folder of a head or of a draft model as --draft, or pass the "
            "target's folder as --target-weights to draft with its own MTP layers, or select "
            "--speculative-algorithm NGRAM.",
            field="draft",
        )
