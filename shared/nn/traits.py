"""What a family of decoders has beyond plain Llama, as data: a family's file fills it in, the loader and the layers read it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.shared.nn.expert_files import ExpertFiles


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


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: K and V of all heads are projections of one cached latent row.

    Attributes:
        rank: Width of the latent.
        query_rank: Width of the queries' own latent; None: they are projected directly.
        nope_dim, rope_dim, value_dim: Per head: unrotated and rotated part of queries and keys, and the values.
        interleaved: The file's rotated dimensions lie in pairs (x0, x1), not in halves.
    """

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family reads from its own keys of a config.json.

    Attributes:
        qkv_bias, o_bias, mlp_bias: Which projections carry a bias.
        head_norm: RMSNorm over each head of Q and K before rotation.
        windows: Per layer, how many tokens a row sees (itself included); 0: all. Empty: 0 everywhere.
        sinks: A learned logit per head takes part in each softmax and carries no value.
        experts: Sparse layers, or None.
        sparse: Per layer, whether its MLP is the experts. Empty: none.
        latent: Multi-head latent attention, or None.
        rope_theta: What a config without one means.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False
    experts: ExpertsConfig | None = None
    sparse: tuple[bool, ...] = ()
    latent: LatentConfig | None = None
    rope_theta: float = 10000.0
