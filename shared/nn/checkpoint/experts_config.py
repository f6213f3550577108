"""The experts of a sparse layer: how many there are, how rows are routed, and how a checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from outrider.shared.nn.checkpoint.checkpoint_reader import TensorSource


class Scoring(Enum):
    """How a router turns logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """How rows choose experts.

    Attributes:
        top_k: Experts per row.
        scoring: Of the logits, over all experts.
        normalise: Whether the weights of the chosen sum to one (before `scale`).
        scale: Factor on the weights.
        groups, kept_groups, group_top: Experts are chosen from the `kept_groups` of `groups` whose best `group_top` sum highest.
        bias: The router's projection has a bias.
        choice_bias: A bias per expert takes part in the choice but not in the weights.
    """

    top_k: int
    scoring: Scoring = Scoring.SOFTMAX
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 1
    bias: bool = False
    choice_bias: bool = False


class ExpertWeights(NamedTuple):
    """Routed experts of one layer.

    Attributes:
        gate_up: ``[experts, 2 * intermediate, hidden]``, gate first.
        down: ``[experts, hidden, intermediate]``.
        gate_up_bias, down_bias: ``[experts, 2 * intermediate]``, ``[experts, hidden]``, or None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class ExpertFiles(Protocol):
    """One layout of a layer's experts in a checkpoint."""

    @property
    def router(self) -> str:
        """Name of the router's projection behind the layer's prefix."""
        ...

    @property
    def grain(self) -> int:
        """Values of the intermediate size that lie together in the files: a part of an expert is a multiple of them."""
        ...

    def load(
        self, source: TensorSource, prefix: str, config: ExpertsConfig, hidden_size: int
    ) -> ExpertWeights:
        """Load the experts of the layer whose tensors start with `prefix` (``model.layers.3.``)."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The sparse layers of a model.

    Attributes:
        num_experts, intermediate_size: Routed experts.
        routing: How they are chosen.
        files: How a checkpoint stores them.
        shared_size: Intermediate size of the shared expert that every row passes; 0: there is none.
        swiglu_limit, swiglu_alpha: gpt-oss's ``(clamp(up) + 1) * gate * sigmoid(alpha * gate)``; None: ``silu(gate) * up``.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    files: ExpertFiles
    shared_size: int = 0
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
