"""Statistics of stored tensors that reveal NaN, constant tensors and fresh initialisations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SAMPLE = 1 << 20
SPREAD = 16
"""Number of positions in a tensor, evenly spaced, at which sample rows are read."""
NEAR_ZERO = 1e-6
SIGMAS = 5.0
UNIFORM = 1.2
SLACK = 0.02
"""Tolerated relative error of formulas for independent numbers, which are inexact for small tensors."""
MIN_NUMBERS = 4096
"""Minimum count of numbers that is needed to identify a distribution."""
ENOUGH_NUMBERS = 1 << 15
"""From this size on, a single trained matrix is distinguishable from independent numbers."""


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of a floating-point tensor, or of a sample of its numbers.

    The three spreads measure how much the rows or the columns differ from each other. A spread is the
    standard deviation of the rows' or columns' norms or means. It is divided by the standard deviation that
    independent numbers with the same kurtosis would have. A spread of 1 therefore indicates independent
    numbers. Trained weights have larger spreads. For vectors, the spreads are 0.

    Attributes:
        numbers: Number of examined numbers.
        finite: True if all examined numbers are finite.
        mean, std: Mean and standard deviation.
        kurtosis: Excess kurtosis, which is 0 for a normal distribution and -1.2 for a uniform distribution.
            Trained weights have a higher, sometimes far higher, kurtosis.
        row_spread, column_spread: Spread of the norms of the rows, and spread of the norms of the columns.
        mean_spread: Spread of the means of the columns.
        rows, columns: Number of examined rows, and length of a row. For vectors, both are 0.
        negative: Share of the numbers that are negative.
        constant: True if all numbers are equal.
    """

    numbers: int
    finite: bool
    mean: float
    std: float
    kurtosis: float
    row_spread: float
    column_spread: float
    mean_spread: float
    rows: int
    columns: int
    negative: float
    constant: bool

    @property
    def looks_initialised(self) -> str:
        """Distribution from which the numbers seem to be independent samples. Empty if there is none."""
        if self.numbers < MIN_NUMBERS or not self.finite or self.constant or not self.columns:
            return ""
        spreads = (
            (self.row_spread, self.rows),
            (self.column_spread, self.columns),
            (self.mean_spread, self.columns),
        )
        if any(abs(spread - 1) > SIGMAS / math.sqrt(2 * max(count, 2)) + SLACK for spread, count in spreads):
            return ""
        if abs(self.mean) > SIGMAS * self.std / math.sqrt(self.numbers):
            return ""
        tolerance = SIGMAS * math.sqrt(24 / self.numbers) + 0.01
        if abs(self.kurtosis) < tolerance:
            return f"normal, std {self.std:.3g}"
        if abs(self.kurtosis + UNIFORM) < tolerance:
            return f"uniform, ±{self.std * math.sqrt(3):.3g}"
        # Some libraries initialise with a truncated normal distribution.
        return f"truncated normal, std {self.std:.3g}" if -UNIFORM < self.kurtosis < 0 else ""

    @property
    def is_large(self) -> bool:
        """True if the tensor is large enough to be judged on its own."""
        return self.numbers >= ENOUGH_NUMBERS


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if a tensor contains no NaN or infinity. Reads all numbers without copying them."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    wide = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    low, high = torch.aminmax(wide)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def sample(tensor: torch.Tensor, size: int = SAMPLE) -> torch.Tensor:
    """Return about `size` numbers of a tensor, as fp32. A tensor with fewer numbers is returned whole.

    The returned sample consists of whole rows from evenly spaced positions of the tensor.

    Returns:
        ``[rows, columns]``, or ``[numbers]`` for a vector.
    """
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1)
    per_row = rows.shape[1] if rows.dim() > 1 else 1
    wanted = max(1, size // max(per_row, 1))
    if wanted >= rows.shape[0]:
        return rows.to(torch.float32)
    piece, step = max(1, wanted // SPREAD), max(1, rows.shape[0] // SPREAD)
    return torch.cat([rows[start : start + piece] for start in range(0, rows.shape[0], step)]).to(
        torch.float32
    )


def tensor_statistics(tensor: torch.Tensor, *, whole: bool) -> TensorStatistics:
    """Return the statistics of a stored tensor.

    Args:
        tensor: Floating-point tensor on the host.
        whole: True checks every number for NaN and infinity. False checks only a sample of the numbers, and
            does not read the rest of a large tensor.
    """
    sampled = sample(tensor) if whole else sample(tensor, SAMPLE >> 4)
    numbers, columns = sampled.numel(), sampled.shape[-1] if sampled.dim() > 1 else 0
    finite = is_finite(tensor if whole else sampled)
    if not numbers or not finite:
        return TensorStatistics(
            numbers, finite, math.nan, math.nan, math.nan, 0.0, 0.0, 0.0, 0, columns, 0.0, False
        )
    centred = (sampled - sampled.mean()).double()
    variance = float(centred.square().mean())
    kurtosis = float(centred.pow(4).mean()) / variance**2 - 3 if variance > 0 else 0.0
    rows, spreads = (
        (numbers // columns, _spreads(sampled, math.sqrt(variance), kurtosis))
        if columns
        else (0, (0.0, 0.0, 0.0))
    )
    constant = bool((sampled == sampled.reshape(-1)[0]).all())
    negative = float((sampled < 0).float().mean())
    mean, std = float(sampled.mean()), math.sqrt(variance)
    return TensorStatistics(numbers, finite, mean, std, kurtosis, *spreads, rows, columns, negative, constant)


def _spreads(sampled: torch.Tensor, std: float, kurtosis: float) -> tuple[float, float, float]:
    """Return the row, column and mean spread of ``[rows, columns]``; see `TensorStatistics`."""
    rows, columns = sampled.shape
    squares = max(kurtosis + 2, NEAR_ZERO)  # variance of the squared numbers, divided by their squared mean

    def of_norms(norms: torch.Tensor, length: int) -> float:
        relative = float(norms.std(unbiased=False) / norms.mean().clamp_min(1e-30))
        return relative / math.sqrt(squares / (4 * length))

    means = float(sampled.mean(dim=0).std(unbiased=False)) / max(std / math.sqrt(rows), 1e-30)
    return of_norms(sampled.norm(dim=1), columns), of_norms(sampled.norm(dim=0), rows), means
