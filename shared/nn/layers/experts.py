"""Mixture of experts: routes each row to its top-k experts and sums their weighted outputs."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.shared.nn.checkpoint.experts_config import ExpertsConfig, ExpertWeights, Routing, Scoring
from outrider.shared.nn.layers.modules import GatedMLP
from outrider.shared.nn.layers.routes import note_route


class Router:
    """Router of a sparse layer: chooses the experts of each row (token), in fp32.

    Args:
        weight: ``[experts, hidden] fp32``.
        bias: ``[experts] fp32``, bias of the projection, or None.
        choice_bias: ``[experts] fp32``, or None. This bias is added to the scores that choose the experts,
            but not to the scores that become the experts' weights.
        routing: How experts are chosen and weighted.
    """

    __slots__ = ("bias", "choice_bias", "routing", "weight")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        choice_bias: torch.Tensor | None,
        routing: Routing,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.choice_bias = choice_bias
        self.routing = routing

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights ``[rows, top_k] fp32`` and indices ``[rows, top_k] int64`` of the experts.

        Args:
            x: ``[rows, hidden]``.
        """
        rule = self.routing
        logits = functional.linear(x.float(), self.weight, self.bias)  # [rows, experts]
        scores = logits.softmax(-1) if rule.scoring is Scoring.SOFTMAX else logits.sigmoid()
        ranked = scores if self.choice_bias is None else scores + self.choice_bias
        if rule.groups > 1:
            ranked = self._keep_groups(ranked)
        chosen = ranked.topk(rule.top_k, dim=-1).indices
        note_route(chosen)
        weights = scores.gather(1, chosen)
        if rule.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if rule.scale == 1.0 else weights * rule.scale, chosen

    def _keep_groups(self, ranked: torch.Tensor) -> torch.Tensor:
        """Set the scores of all experts outside the best groups to minus infinity."""
        rule = self.routing
        grouped = ranked.view(ranked.shape[0], rule.groups, -1)  # [rows, groups, experts / groups]
        best = grouped.topk(rule.group_top, dim=-1).values.sum(-1).topk(rule.kept_groups, dim=-1).indices
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)


class SparseMLP:
    """MLP of a sparse layer: routed experts, plus an optional shared expert for all rows.

    On CUDA in bf16, rows are sorted by expert and multiplied in one grouped product. The host does not wait
    for the device. In all other cases, the experts run one after another.

    Args:
        router: Chooses the experts of each row.
        weights: Weights of the routed experts.
        shared: The shared expert, or None.
        config: Sizes and activation.
    """

    __slots__ = ("_grouped", "_limit", "nbytes", "router", "shared", "swiglu_alpha", "weights")

    def __init__(
        self, router: Router, weights: ExpertWeights, shared: GatedMLP | None, config: ExpertsConfig
    ) -> None:
        self.router = router
        self.weights = weights
        self.shared = shared
        self._limit = config.swiglu_limit
        self.swiglu_alpha = config.swiglu_alpha
        self._grouped = weights.gate_up.device.type == "cuda" and weights.gate_up.dtype is torch.bfloat16
        self.nbytes = weights.gate_up.nbytes + weights.down.nbytes + (shared.nbytes if shared else 0)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``residual + mlp(x)``, ``[rows, hidden]``."""
        weights, chosen = self.router(x)
        routed = (
            self._run_grouped(x, weights, chosen) if self._grouped else self._run_each(x, weights, chosen)
        )
        total = routed.to(x.dtype).add_(residual)
        return total if self.shared is None else self.shared(x, total)

    def _run_each(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts, ``[rows, hidden] fp32``, one expert at a time.

        The host waits for the device, because the host must know which experts were chosen.
        """
        gate_up, down, gate_up_bias, down_bias = self.weights
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            inner = functional.linear(
                x[rows], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert]
            )
            result = functional.linear(
                self._activate(inner), down[expert], None if down_bias is None else down_bias[expert]
            )
            out.index_add_(0, rows, result * weights[rows, place, None])
        return out

    def _run_grouped(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the sum that `_run_each` returns, for bf16 on CUDA, without waiting for the device."""
        gate_up, down, gate_up_bias, down_bias = self.weights
        experts, order = chosen.flatten().sort(stable=True)  # [rows * top_k]
        rows = order // chosen.shape[1]
        ends = torch.searchsorted(experts, torch.arange(gate_up.shape[0], device=x.device), right=True).to(
            torch.int32
        )
        inner = functional.grouped_mm(x[rows], gate_up.transpose(1, 2), offs=ends)
        if gate_up_bias is not None:
            inner = inner + gate_up_bias[experts]
        result = functional.grouped_mm(self._activate(inner), down.transpose(1, 2), offs=ends)
        if down_bias is not None:
            result = result + down_bias[experts]
        pairs = torch.empty(result.shape, dtype=torch.float32, device=x.device)
        pairs[order] = result * weights.flatten()[order, None]
        return pairs.view(*chosen.shape, -1).sum(1)  # a fixed order of addition, unlike index_add_

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Apply the activation to ``[pairs, 2 * intermediate]``. Return ``[pairs, intermediate]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        if self._limit is None:
            return functional.silu(gate) * up
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.swiglu_alpha))
