"""Defines `GenericLayout`, the result of a probe, and `GenericConfig`, without importing `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.shared.nn.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class GenericLayout:
    """Layout of a model that runs through the modules of `transformers`, as found by a probe of the model.

    Attributes:
        class_name: Name of the model's class in `transformers`.
        attention_paths: For each layer, the path of the module that calls the attention.
        layer_paths: For each layer, the path of the decoder layer's module. The output of this module is the
            residual stream after the layer.
        windows: For each layer, the number of tokens that a row sees, including itself. 0 means all tokens.
        num_heads, num_kv_heads, head_dim: Shape of every layer's attention.
        hidden_size: Width of the rows after the final norm.
        max_positions: Number of rows of the learned position table. None if positions are rotary. Rotary
            positions have no limit.
        shapes: Maps the name of each tensor in a checkpoint to its shape. Tied tensors are left out. Empty if
            checkpoints store the weights in another layout than `transformers` (for example with one tensor
            per expert).
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
    """Configuration of a model that runs through the modules of `transformers`.

    The fields of `ModelConfig` that describe the computations of a decoder have no meaning in this class.

    Attributes:
        layout: Layout of the model, as found by a probe of the model.
    """

    layout: GenericLayout

    @property
    def max_positions(self) -> int | None:
        return self.layout.max_positions
