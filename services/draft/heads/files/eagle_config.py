"""Parses the configuration of an EAGLE-1/2 head, and checks that the head fits the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.services.draft.heads.files.head_config import SERVE_ANOTHER, HeadConfig, flatten
from outrider.services.draft.heads.files.mistral_format import ARCHITECTURES, config_file, read_head_config
from outrider.services.draft.heads.files.modelopt_config import FIRST_NORM, check_eagle
from outrider.services.draft.target_info import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config.model_config import CONFIG_FILE, ConfigReader


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The configuration of an EAGLE-1/2 head.

    Attributes:
        layer: The head's decoder layers.
        fc_bias: True if the projection ``fc`` has a bias. The default is False for heads in Mistral's format,
            and True for all others.
        qkv_bias: True if the projections of q, k and v have biases, as they do in heads for Qwen2.
        first_norm: True if layer 0 has an input norm, as in ModelOpt's and Mistral's heads.
        is_mistral: True for a head in Mistral's own format, whose last layer is followed by a norm.
        hot_vocab_size: Number of frequent tokens that the head drafts (FR-Spec). With None, the head drafts
            all tokens.
    """

    layer: HeadConfig
    fc_bias: bool
    qkv_bias: bool
    first_norm: bool
    is_mistral: bool
    hot_vocab_size: int | None

    @classmethod
    def from_dir(cls, path: Path, *, native: bool = False) -> EagleConfig:
        """Read the configuration in a head's folder.

        Raises:
            CheckpointError: A key is missing or not supported; `field` names the key.
        """
        return cls.parse(read_head_config(path), config_file(path), native=native)

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], source: Path | str = CONFIG_FILE, *, native: bool = False
    ) -> EagleConfig:
        """Parse the configuration of an EAGLE-1/2 head.

        Args:
            raw: The configuration as a JSON object.
            source: The file that the object was read from, for error messages.
            native: True if the head's tensors have Mistral's names.
        """
        reader = ConfigReader(flatten(raw, source), source)
        layer = HeadConfig.parse(reader)
        if reader.positive("target_hidden_size", layer.hidden_size) != layer.hidden_size:
            raise reader.error(
                "target_hidden_size",
                "must equal hidden_size: an EAGLE-1/2 head drafts with the target's lm_head",
            )
        is_mistral = (
            native or "dim" in raw or bool(set(reader.strings("architectures") or ()) & set(ARCHITECTURES))
        )
        check_eagle(reader, ends_with_norm=is_mistral)
        return cls(
            layer,
            reader.flag("bias", not is_mistral),
            reader.flag("qkv_bias", reader.flag("attention_bias", False)),
            reader.flag(FIRST_NORM, is_mistral),
            is_mistral,
            reader.positive("hot_vocab_size", 0) or None,
        )

    def check_target(self, target: TargetInfo) -> None:
        """Check that the head fits a target.

        Raises:
            CheckpointError: The head was made for another target. The message names the key and both values.
        """
        self.layer.check_vocabulary(target)
        if target.hidden_size != self.layer.hidden_size:
            raise CheckpointError(
                f"The head reads features of hidden size {self.layer.hidden_size} (hidden_size), but the "
                f"target's hidden size is {target.hidden_size}: {SERVE_ANOTHER}.",
                field="hidden_size",
            )
