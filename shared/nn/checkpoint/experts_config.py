"""Describes the experts of a sparse layer: their number, their routing, and their layout in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from outrider.shared.nn.checkpoint.tensor_source import TensorSource


class Scoring(Enum):
    """How a router turns logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class Routing:
    """Rule by which a router chooses and weights the experts of each row (token).

    Attributes:
        top_k: Number of experts per row.
        scoring: Function that turns the router's logits into scores. It is applied over all experts.
        normalise: True if the weights of the chosen experts are normalized to a sum of one before they are
            multiplied by `scale`.
        scale: Factor by which the weights are multiplied.
        groups, kept_groups, group_top: Parameters of group-limited routing. The experts form `groups` groups.
            Groups are ranked by the sum of their `group_top` best scores. Experts are chosen only from the
            `kept_groups` best groups.
        bias: True if the router's projection has a bias.
        choice_bias: True if each expert has a bias that affects which experts are chosen, but not the weights
            of the chosen experts.
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
    """Weights of all routed experts of one layer.

    Attributes:
        gate_up: ``[experts, 2 * intermediate, hidden]``. The gate rows come before the up rows.
        down: ``[experts, hidden, intermediate]``.
        gate_up_bias: ``[experts, 2 * intermediate]``, or None for experts without biases.
        down_bias: ``[experts, hidden]``, or None for experts without biases.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class ExpertFiles(Protocol):
    """Layout of a layer's experts in a checkpoint."""

    @property
    def router(self) -> str:
        """Name of the tensor of the router's projection, without the prefix of the layer."""
        ...

    @property
    def grain(self) -> int:
        """Granularity of an expert's intermediate size in the checkpoint's files.

        With tensor parallelism, each rank has a part of the intermediate size. The size of this part must be
        a multiple of the granularity.
        """
        ...

    def load(
        self, source: TensorSource, prefix: str, config: ExpertsConfig, hidden_size: int
    ) -> ExpertWeights:
        """Load the experts of the layer whose tensors start with `prefix` (``model.layers.3.``)."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Configuration of a model's sparse layers, i.e. the layers with experts.

    Attributes:
        num_experts, intermediate_size: Number of routed experts, and intermediate size of each.
        routing: How experts are chosen and weighted.
        files: Layout of the experts in the checkpoint.
        shared_size: Intermediate size of the shared expert, through which every row passes. 0 if there is no
            shared expert.
        swiglu_limit, swiglu_alpha: Parameters of the activation of gpt-oss,
            ``(clamp(up) + 1) * gate * sigmoid(alpha * gate)``. If the limit is None, the activation is
            ``silu(gate) * up`` instead.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    files: ExpertFiles
    shared_size: int = 0
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
