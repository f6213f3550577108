"""The configuration of an EAGLE-1/2 head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.services.draft.heads.head_config import SERVE_ANOTHER, HeadConfig, flatten
from outrider.services.draft.strategy import TargetInfo
from outrider.shared.base.errors import CheckpointError
from outrider.shared.nn.config import CONFIG_FILE, ConfigReader, read_json


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """An EAGLE-1/2 head.

    Attributes:
        layer: Its decoder layers.
        fc_bias: ``fc`` has a bias; true unless the file says ``"bias": false``.
        qkv_bias: The attention's projections have one (heads for Qwen2).
    """

    layer: HeadConfig
    fc_bias: bool
    qkv_bias: bool

    @classmethod
    def from_dir(cls, path: Path) -> EagleConfig:
        """Read ``config.json``.

        Raises:
            CheckpointError: something is missing or not supported; `field` names the key.
        """
        return cls.parse(read_json(path / CONFIG_FILE), path / CONFIG_FILE)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: Path | str = CONFIG_FILE) -> EagleConfig:
        """Parse a configuration that is already read; `source` is named in errors."""
        reader = ConfigReader(flatten(raw, source), source)
        layer = HeadConfig.parse(reader)
        if reader.positive("target_hidden_size", layer.hidden_size) != layer.hidden_size:
            raise reader.error("target_hidden_size", "must be hidden_size: an EAGLE-1/2 head shares the target's lm_head")
        return cls(layer, reader.flag("bias", True), reader.flag("qkv_bias", reader.flag("attention_bias", False)))

    def check_target(self, target: TargetInfo) -> None:
        """Raise `CheckpointError` when the head was made for another target; names the key and both values."""
        self.layer.check_vocabulary(target)
        if target.hidden_size != self.layer.hidden_size:
            raise CheckpointError(
                f"The head reads features of hidden size {self.layer.hidden_size} (hidden_size), the target's is {target.hidden_size}: "
                f"{SERVE_ANOTHER}.",
                field="hidden_size",
            )
