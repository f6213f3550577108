"""The target as it describes itself in its Hello."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.nn.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target says of itself in its Hello.

    Attributes:
        target_id: Identifies the target process; its bulk stream names it too.
        fingerprint: Of the target's weights or configuration.
        vocab_size, hidden_size, num_layers: Of the target's model.
        model_type: Of its configuration, e.g. ``deepseek_v3``; some heads count layers by the target's family. Empty when it is not told.
        tokenizer: `tokenizer_fingerprint` of its folder; empty when it is not told.
    """

    target_id: str
    fingerprint: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    model_type: str = ""
    tokenizer: str = ""

    @classmethod
    def of(cls, target_id: str, config: ModelConfig, fingerprint: str | None = None) -> TargetInfo:
        """Describe a target whose configuration is at hand; `fingerprint` is the configuration's by default."""
        sizes = (config.vocab_size, config.hidden_size, config.num_layers)
        return cls(target_id, fingerprint or config.fingerprint, *sizes, config.model_type)
