"""Statistics of stored tensors: not-a-number, constant, and what an initialisation leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SAMPLE = 1 << 20
SPREAD = 16
"""Pieces that a sample is taken in."""
NEAR_ZERO = 1e-6
SIGMAS = 5.0
UNIFORM = 1.2
SLACK = 0.02
"""Relative deviation that the formulas for independent numbers may be off by at small sizes."""
MIN_NUMBERS = 4096
"""Fewer say nothing about a distribution."""
ENOUGH_NUMBERS = 1 << 15
"""From here on a trained matrix shows, alone, that it is no draw of independent numbers: smaller ones may hide it."""


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Of one floating-point tensor, or of a sample of it.

    Attributes:
        numbers: How many were looked at.
        finite: Whether all of them are.
        mean, std: Of them.
        kurtosis: Excess; 0 for a normal distribution, -1.2 for a uniform one; trained weights have more, some far more.
        row_spread, column_spread: Deviation of the norms of rows and of columns, and
        mean_spread: of the means of columns, each in units of what independent numbers of this kurtosis have: 1 for them, more in trained
            weights, whose rows and columns differ in size; 0 for vectors.
        rows, columns: That were looked at, and their length; 0 for vectors.
        negative: Share of negative numbers.
        constant: All numbers are the first one.
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
        """Name of the distribution that all numbers seem to be drawn from independently; empty if they do not."""
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
        # A normal distribution that was cut off, as some libraries draw it.
        return f"truncated normal, std {self.std:.3g}" if -UNIFORM < self.kurtosis < 0 else ""

    @property
    def telling(self) -> bool:
        """Whether the look of this tensor alone says something."""
        return self.numbers >= ENOUGH_NUMBERS


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether no number of a tensor is NaN or infinite; looks at all of them, without a copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    wide = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    low, high = torch.aminmax(wide)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def sample(tensor: torch.Tensor, size: int = SAMPLE) -> torch.Tensor:
    """Return about `size` numbers at most, in whole rows from a few places of the tensor, fp32: ``[rows, columns]`` or ``[numbers]``."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1)
    per_row = rows.shape[1] if rows.dim() > 1 else 1
    wanted = max(1, size // max(per_row, 1))
    if wanted >= rows.shape[0]:
        return rows.to(torch.float32)
    piece, step = max(1, wanted // SPREAD), max(1, rows.shape[0] // SPREAD)
    return torch.cat([rows[start : start + piece] for start in range(0, rows.shape[0], step)]).to(
        torch.float32
    )


def describe(tensor: torch.Tensor, *, whole: bool) -> TensorStatistics:
    """Return the statistics of a stored tensor.

    Args:
        tensor: Floating point, on the host.
        whole: Look at every number for NaN; otherwise at the sample's only (so that a large target is not read in full).
    """
    taken = sample(tensor) if whole else sample(tensor, SAMPLE >> 4)
    numbers, columns = taken.numel(), taken.shape[-1] if taken.dim() > 1 else 0
    finite = is_finite(tensor if whole else taken)
    if not numbers or not finite:
        return TensorStatistics(
            numbers, finite, math.nan, math.nan, math.nan, 0.0, 0.0, 0.0, 0, columns, 0.0, False
        )
    centred = (taken - taken.mean()).double()
    variance = float(centred.square().mean())
    kurtosis = float(centred.pow(4).mean()) / variance**2 - 3 if variance > 0 else 0.0
    rows, spreads = (
        (numbers // columns, _spreads(taken, math.sqrt(variance), kurtosis))
        if columns
        else (0, (0.0, 0.0, 0.0))
    )
    constant = bool((taken == taken.reshape(-1)[0]).all())
    negative = float((taken < 0).float().mean())
    mean, std = float(taken.mean()), math.sqrt(variance)
    return TensorStatistics(numbers, finite, mean, std, kurtosis, *spreads, rows, columns, negative, constant)


def _spreads(taken: torch.Tensor, std: float, kurtosis: float) -> tuple[float, float, float]:
    """Return the row, column and mean spread of ``[rows, columns]``, see `TensorStatistics`."""
    rows, columns = taken.shape
    squares = max(kurtosis + 2, NEAR_ZERO)  # variance of a squared number over its squared mean

    def of_norms(norms: torch.Tensor, length: int) -> float:
        relative = float(norms.std(unbiased=False) / norms.mean().clamp_min(1e-30))
        return relative / math.sqrt(squares / (4 * length))

    means = float(taken.mean(dim=0).std(unbiased=False)) / max(std / math.sqrt(rows), 1e-30)
    return of_norms(taken.norm(dim=1), columns), of_norms(taken.norm(dim=0), rows), means
