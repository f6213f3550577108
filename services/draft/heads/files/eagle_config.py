"""The configuration of an EAGLE-1/2 head."""

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
    """An EAGLE-1/2 head.

    Attributes:
        layer: Its decoder layers.
        fc_bias: ``fc`` has a bias; true unless the file says ``"bias": false``. False in Mistral's heads.
        qkv_bias: The attention's projections have one (heads for Qwen2).
        first_norm: Layer 0 has its input norm: ModelOpt's heads, and Mistral's.
        is_mistral: Mistral's own kind: layer 0 has its norm, and a norm ends the stack.
        hot_vocab_size: FR-Spec: how many frequent tokens it drafts, or None for all.
    """

    layer: HeadConfig
    fc_bias: bool
    qkv_bias: bool
    first_norm: bool
    is_mistral: bool
    hot_vocab_size: int | None

    @classmethod
    def from_dir(cls, path: Path, *, native: bool = False) -> EagleConfig:
        """Read a folder's configuration.

        Raises:
            CheckpointError: something is missing or not supported; `field` names the key.
        """
        return cls.parse(read_head_config(path), config_file(path), native=native)

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], source: Path | str = CONFIG_FILE, *, native: bool = False
    ) -> EagleConfig:
        """Parse a configuration that is already read; `source` is named in errors, `native`: the tensors have Mistral's names."""
        reader = ConfigReader(flatten(raw, source), source)
        layer = HeadConfig.parse(reader)
        if reader.positive("target_hidden_size", layer.hidden_size) != layer.hidden_size:
            raise reader.error(
                "target_hidden_size", "must be hidden_size: an EAGLE-1/2 head shares the target's lm_head"
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
        """Raise `CheckpointError` when the head was made for another target; names the key and both values."""
        self.layer.check_vocabulary(target)
        if target.hidden_size != self.layer.hidden_size:
            raise CheckpointError(
                f"The head reads features of hidden size {self.layer.hidden_size} (hidden_size), the target's is {target.hidden_size}: "
                f"{SERVE_ANOTHER}.",
                field="hidden_size",
            )
