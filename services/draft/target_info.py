"""Defines `TargetInfo`, the properties that a target reports in Hello: sizes, model type, fingerprints."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.shared.nn.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The target's description of itself and of its model.

    Attributes:
        target_id: Identifies the target process. The bulk stream of the process carries the same id.
        fingerprint: Fingerprint of the target's weights or of its configuration.
        vocab_size, hidden_size, num_layers: Sizes of the target's model.
        model_type: Model type in the target's configuration, for example ``deepseek_v3``. For some heads, the
            model type decides whether the ids of aux layers stand for outputs or inputs of layers. Empty if
            the model type is unknown.
        tokenizer: `tokenizer_fingerprint` of the target's folder. Empty if the fingerprint is unknown.
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
        """Describe a target by its configuration, whose fingerprint is the default for `fingerprint`."""
        sizes = (config.vocab_size, config.hidden_size, config.num_layers)
        return cls(target_id, fingerprint or config.fingerprint, *sizes, config.model_type)
