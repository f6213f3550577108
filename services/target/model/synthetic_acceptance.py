"""Synthetic acceptance: how many drafts a round accepts is drawn from a stated distribution, whatever the model says.

With random weights a draft never guesses right, so that speed at a given accept length could not be measured without a trained pair. Only
`outrider bench` makes one; no flag, setting or request leads here, and what it measures is labelled with `describe`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from outrider.kernels.synthetic_acceptance import synthetic_acceptance
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.tree import DraftBatch

MAX_LEVELS = 16


class SyntheticAcceptance:
    """Rewrites the chosen tokens of a verified batch on the device, so that the walk accepts a drawn number of drafts.

    A function of (seed, position) like all noise, so that a run repeats itself; capturable into a CUDA graph.

    Args:
        rates: For i = 1, 2 …: the probability that draft i of a path is accepted, given that those before it were. Deeper ones never are.
        vocab_size: Of the target.
        device: Of the target.

    Raises:
        ConfigurationError: A rate is not within 0…1.
    """

    def __init__(self, rates: Sequence[float], vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._thresholds = torch.empty(MAX_LEVELS, dtype=torch.float32, device=device)
        self.set_rates(rates)

    def set_rates(self, rates: Sequence[float]) -> None:
        """Change the distribution; the tensor stays where it is, so that recorded graphs follow.

        Raises:
            ConfigurationError: As the constructor.
        """
        if not 0 < len(rates) <= MAX_LEVELS or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ConfigurationError(
                f"acceptance rates are 1 to {MAX_LEVELS} numbers between 0 and 1, not {list(rates)}.",
                field="--accept-length",
            )
        self.rates = tuple(rates)
        self._survival = tuple(math.prod(self.rates[: depth + 1]) for depth in range(len(self.rates)))
        shares = (*self._survival, *[0.0] * (MAX_LEVELS - len(self.rates)))
        self._thresholds.copy_(torch.tensor([_gumbel_quantile(share) for share in shares]))

    def mean(self, depth: int) -> float:
        """Return the mean accept length in trees of this depth, the bonus token counted."""
        return 1.0 + sum(self._survival[:depth])

    def describe(self) -> str:
        """Return the label of every figure that was measured with it."""
        return "synthetic, per-position rates " + ", ".join(f"{rate:g}" for rate in self.rates)

    def __call__(
        self, chosen: torch.Tensor, drafts: DraftBatch, positions: torch.Tensor, seeds: torch.Tensor
    ) -> torch.Tensor:
        """Return the tokens to walk by, ``[bs, N] int64``; a batch of single nodes is returned as it is.

        Args:
            chosen: ``[bs, N] int64``, what the model chose after each node, padded.
            drafts: The trees.
            positions: ``[bs] int64``, index of the token after each root (committed_len).
            seeds: ``[bs] int64``, of the requests.
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


def rates_of_mean(accept_length: float) -> list[float]:
    """Return the rates of the distribution of least variance with this mean: ``floor`` or ``ceil`` of it, as vLLM's simulation has it.

    Args:
        accept_length: Mean tokens per round, the bonus token counted; at least 1. Trees that are not deep enough accept less.

    Raises:
        ConfigurationError: It is below 1, or beyond `MAX_LEVELS`.
    """
    if not 1.0 <= accept_length <= MAX_LEVELS + 1:
        raise ConfigurationError(
            f"an accept length counts the bonus token and lies between 1 and {MAX_LEVELS + 1}, not {accept_length}.",
            field="--accept-length",
        )
    whole = int(accept_length - 1)
    part = round(accept_length - 1 - whole, 9)
    return [1.0] * whole + ([part] if part or not whole else [])


def _gumbel_quantile(share: float) -> float:
    """Return the value that standard Gumbel noise stays below with probability `share`."""
    if share <= 0.0:
        return -math.inf
    return math.inf if share >= 1.0 else -math.log(-math.log(share))
