"""What a probe learned about a model, and the configuration that carries it. Imports nothing of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.shared.nn.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class GenericLayout:
    """A model whose modules are `transformers`' own.

    Attributes:
        class_name: The class in `transformers`.
        attention_paths: Module that calls the attention of each layer.
        layer_paths: Module of each decoder layer; its output is the residual stream after the layer.
        windows: Per layer, how many tokens a row sees (itself included); 0: all.
        num_heads, num_kv_heads, head_dim: Of every layer.
        hidden_size: Width of the rows after the final norm.
        max_positions: Rows of the model's learned position table; None: positions are rotated, and there is no such limit.
        shapes: Name → shape of the tensors of a checkpoint, without those that are tied. Empty when `transformers` stores the weights
            otherwise than it keeps them (experts in one file tensor each).
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
    """A model whose modules are `transformers`' own. The fields of `ModelConfig` that tell our decoder how to compute mean nothing here.

    Attributes:
        layout: What the probe learned.
    """

    layout: GenericLayout

    @property
    def max_positions(self) -> int | None:
        """See `ModelConfig.max_positions`."""
        return self.layout.max_positions
