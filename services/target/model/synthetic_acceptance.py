"""Synthetic acceptance for benchmarks: draws the number of accepted drafts from a given distribution.

With random weights, the target never accepts a draft. Synthetic acceptance lets a benchmark measure the speed
at a given accept length without trained weights. Only `outrider bench` uses synthetic acceptance. No flag,
setting or request of a server can enable it. Results measured with synthetic acceptance carry the label that
`describe` returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from outrider.kernels.packed_round import PackedTrees
from outrider.kernels.synthetic_acceptance import packed_acceptance, synthetic_acceptance
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.tree import DraftBatch

MAX_LEVELS = 16


class SyntheticAcceptance:
    """Rewrites a batch's chosen tokens on the device so that a randomly drawn number of drafts is accepted.

    The drawn number depends only on the request's seed and the token's position, so that a run is repeatable.
    The rewrite can be captured into a CUDA graph.

    Args:
        rates: For each depth 1, 2 …, the probability that a draft at this depth is accepted if its parent was
            accepted. Drafts at depths without a rate are never accepted.
        vocab_size: The target's vocabulary size.
        device: The target's device.

    Raises:
        ConfigurationError: A rate is outside 0…1, or the number of rates is not allowed.
    """

    def __init__(self, rates: Sequence[float], vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._thresholds = torch.empty(MAX_LEVELS, dtype=torch.float32, device=device)
        self.set_rates(rates)

    def set_rates(self, rates: Sequence[float]) -> None:
        """Change the acceptance rates. Their tensor keeps its address, so CUDA graphs use the new rates.

        Raises:
            ConfigurationError: A rate is outside 0…1, or the number of rates is not allowed.
        """
        if not 0 < len(rates) <= MAX_LEVELS or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ConfigurationError(
                f"acceptance rates must be 1 to {MAX_LEVELS} numbers between 0 and 1, not {list(rates)}.",
                field="--accept-length",
            )
        self.rates = tuple(rates)
        self._survival = tuple(math.prod(self.rates[: depth + 1]) for depth in range(len(self.rates)))
        shares = (*self._survival, *[0.0] * (MAX_LEVELS - len(self.rates)))
        self._thresholds.copy_(torch.tensor([_gumbel_quantile(share) for share in shares]))

    def mean(self, depth: int) -> float:
        """Return the mean accept length, including the bonus token, in trees of this depth."""
        return 1.0 + sum(self._survival[:depth])

    def describe(self) -> str:
        """Return the label for every result measured with these rates."""
        return "synthetic, per-position rates " + ", ".join(f"{rate:g}" for rate in self.rates)

    def __call__(
        self, chosen: torch.Tensor, drafts: DraftBatch, positions: torch.Tensor, seeds: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens that decide which drafts are accepted, ``[bs, N] int64``.

        With single-node trees, return `chosen` unchanged.

        Args:
            chosen: ``[bs, N] int64``; the token that the model chose after each node, padded.
            drafts: The trees.
            positions: ``[bs] int64``; index of the token after each root (committed_len).
            seeds: ``[bs] int64``; the requests' seeds.
        """
        if drafts.tokens.shape[1] == 1:
            return chosen
        return synthetic_acceptance(
            drafts.tokens,
            drafts.parents,
            drafts.depths,
            drafts.num_nodes,
            drafts.ancestors,
            chosen,
            positions,
            seeds,
            self._thresholds,
            self._vocab_size,
        )

    def packed(
        self,
        chosen: torch.Tensor,
        trees: PackedTrees,
        starts: torch.Tensor,
        positions: torch.Tensor,
        seeds: torch.Tensor,
    ) -> torch.Tensor:
        """Return the tokens that decide which drafts are accepted, for trees in packed rows, ``[M] int64``.

        Args:
            chosen: ``[M] int64``, the token that the model chose after each row.
            trees: The packed trees. The chosen token of a tree with a single node is not changed.
            starts: ``[E + 1] int32``, the first row of each tree, as in `packed_round.Entries`.
            positions: ``[M] int64``, the index in its sequence of the token after each row
                (`PlacedEntries.next_positions`).
            seeds: ``[M] int64``, the seed of the request of each row.
        """
        return packed_acceptance(
            trees.tokens,
            trees.parents,
            trees.depths,
            trees.ancestors,
            starts,
            trees.num_nodes,
            chosen,
            positions,
            seeds,
            self._thresholds,
            self._vocab_size,
        )


def rates_of_mean(accept_length: float) -> list[float]:
    """Return the acceptance rates with this mean accept length and the least variance.

    With these rates, the accept length of every round is the ``floor`` or ``ceil`` of the mean, as in vLLM's
    simulation.

    Args:
        accept_length: Mean number of tokens per round, including the bonus token, at least 1. If the trees
            are too shallow, the actual mean is lower.

    Raises:
        ConfigurationError: The accept length is below 1 or above `MAX_LEVELS` + 1.
    """
    if not 1.0 <= accept_length <= MAX_LEVELS + 1:
        raise ConfigurationError(
            f"the accept length (including the bonus token) must be between 1 and {MAX_LEVELS + 1}, "
            f"not {accept_length}.",
            field="--accept-length",
        )
    whole = int(accept_length - 1)
    part = round(accept_length - 1 - whole, 9)
    return [1.0] * whole + ([part] if part or not whole else [])


def _gumbel_quantile(share: float) -> float:
    """Return the value below which standard Gumbel noise lies with probability `share`."""
    if share <= 0.0:
        return -math.inf
    return math.inf if share >= 1.0 else -math.log(-math.log(share))
