"""One figure of `outrider bench kernels`, and what the modules that make them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.bench.measure.clock import Work as Call
from outrider.bench.measure.floors import Work
from outrider.bench.stacks.shapes import NamedShape

EPS = 1e-5
REPEATS = 8
"""How often a small kernel is repeated in a measurement; its data may stay in a cache, as they do in a round."""


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What to measure; the fields are the flags of `outrider bench kernels`."""

    shape: NamedShape
    device: torch.device
    dtype: torch.dtype
    only: str
    output: Path | None

    @property
    def small(self) -> bool:
        """Whether sizes are for a test."""
        return self.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: a call that enqueues `copies` repetitions, and what one of them must do. No work: its launch is all there is.

    The name begins with the function that is called, or says what a whole pass is.
    """

    name: str
    call: Call
    work: Work | None
    copies: int = 1


def over(many: Sequence[Any] | range, call: Callable[[Any], object]) -> Call:
    """Return work that calls once per copy."""

    def work() -> None:
        for one in many:
            call(one)

    return work


def small_kernel(name: str, call: Callable[[], object]) -> Case:
    """Return the case of a kernel of a few bytes, which is bound by its launch."""
    return Case(name, over(range(REPEATS), lambda _index: call()), None, REPEATS)
