"""Defines `GenericLayout`, the result of a probe, and its configuration; does not import `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.shared.nn.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class GenericLayout:
    """Layout of a model that runs through transformers' modules.

    Attributes:
        class_name: Name of its class in `transformers`.
        attention_paths: Path of the module that calls the attention, per layer.
        layer_paths: Path of the decoder layer, per layer. Its output is the residual stream after the layer.
        windows: Tokens that a row sees, itself included, per layer; 0 for all.
        num_heads, num_kv_heads, head_dim: Shape of every layer's attention.
        hidden_size: Width of the rows after the final norm.
        max_positions: Rows of the learned position table; None if positions are rotary and have no limit.
        shapes: Name → shape of the tensors in a checkpoint, without tied ones. Empty if files store the
            weights differently than `transformers` keeps them (each expert as a tensor of its own).
    """

    class_name: str
    attention_paths: tuple[str, ...]
    layer_paths: tuple[str, ...]
    windows: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    max_positions: int | None
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class GenericConfig(ModelConfig):
    """Configuration of a model that runs through transformers' modules.

    `ModelConfig`'s fields that describe how a decoder computes do not apply here.

    Attributes:
        layout: Result of the probe.
    """

    layout: GenericLayout

    @property
    def max_positions(self) -> int | None:
        return self.layout.max_positions
