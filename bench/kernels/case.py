"""`KernelCase`, one measurement of `outrider bench kernels`, and helpers to make cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.bench.measure.clock import TimedWork as Call
from outrider.bench.measure.floors import Work
from outrider.bench.stacks.shapes import NamedShape

EPS = 1e-5
REPEATS = 8
"""Number of repetitions of a small kernel per measurement. As in a round, its data may stay in a cache."""


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Options of the measurement. Its fields are the flags of `outrider bench kernels`."""

    shape: NamedShape
    device: torch.device
    dtype: torch.dtype
    only: str
    output: Path | None

    @property
    def small(self) -> bool:
        """True if the measurement uses small sizes, as it does for a test on a CPU."""
        return self.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One measurement of a kernel or of a whole pass.

    Attributes:
        name: Name of the case. It begins with the name of the measured function or pass.
        call: Function that enqueues `copies` repetitions of the work.
        work: Smallest numbers of bytes and operations that one repetition needs. None if only the launch
            limits the time.
        copies: Number of repetitions that `call` enqueues.
    """

    name: str
    call: Call
    work: Work | None
    copies: int = 1


def over(many: Sequence[Any] | range, call: Callable[[Any], object]) -> Call:
    """Return a function that calls `call` once for each element of `many`."""

    def work() -> None:
        for one in many:
            call(one)

    return work


def small_kernel(name: str, call: Callable[[], object]) -> KernelCase:
    """Return the case of a kernel that moves few bytes, so that only the launch limits its time."""
    return KernelCase(name, over(range(REPEATS), lambda _index: call()), None, REPEATS)
