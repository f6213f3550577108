"""Profiles the GPU kernels of steady rounds: idle shares, gaps, and the time of each kernel.

The start and end times of kernels come from the GPU driver's profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GAP_BETWEEN_NS = 8_000
"""A longer gap counts as a wait for the host's next launch. Kernels of one graph are 1 to 3 µs apart."""
EDGE = 0.25
"""Share of the recording to drop at each end, because starting and stopping the recording delays the host."""
SHOWN_KERNELS = 40

Interval = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Profile:
    """Kernel times and idle times in the middle part of a profiler recording, called the span.

    Attributes:
        span_ms: Length of the span, in milliseconds.
        idle: Share of the span in which no kernel runs, including short gaps between kernels of a graph.
        idle_between: Share of the span in gaps longer than `GAP_BETWEEN_NS`. In such gaps, the GPU waits for
            the host.
        longest_gap_us: Longest gap, in microseconds.
        kernels: (name, launches, milliseconds, share of the span) of each kernel. The kernel with the longest
            time is first.
    """

    span_ms: float
    idle: float
    idle_between: float
    longest_gap_us: float
    kernels: Sequence[tuple[str, int, float, float]]

    def as_json(self) -> dict[str, Any]:
        """Return the profile as JSON values. Kernels become lists."""
        return {
            "span_ms": self.span_ms,
            "gpu_idle": self.idle,
            "gpu_idle_between": self.idle_between,
            "longest_gap_us": self.longest_gap_us,
            "kernels": [list(kernel) for kernel in self.kernels],
        }


def profiled(start: Callable[[], None], span: Callable[[], None]) -> Profile | None:
    """Record the GPU's kernels while `span` runs. Return None if nothing was recorded.

    Do not measure durations of rounds during the recording, because the recording slows launches down.

    Args:
        start: Function that returns when the GPU has reached the work to record.
        span: Function that returns when enough work is recorded.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):  # a process's first recording starts slowly
        torch.cuda.synchronize()
    start()
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        span()
    results = recording.profiler.kineto_results if recording.profiler is not None else None
    if results is None:
        return None
    events = [event for event in results.events() if event.device_type().name == "CUDA"]
    return summarise_kernels(
        [(event.start_ns(), event.start_ns() + event.duration_ns(), event.name()) for event in events]
    )


def summarise_kernels(intervals: Sequence[Interval]) -> Profile | None:
    """Summarise the middle part of a profiler recording. Return None if it contains too few kernels.

    Args:
        intervals: (start, end, name) of each kernel and copy, in nanoseconds.
    """
    if len(intervals) < 8:
        return None
    first, last = min(start for start, _, _ in intervals), max(end for _, end, _ in intervals)
    begin, stop = first + (last - first) * EDGE, last - (last - first) * EDGE
    middle = sorted(interval for interval in intervals if interval[0] >= begin and interval[1] <= stop)
    if len(middle) < 2:
        return None
    busy_until, idle, between, longest = middle[0][0], 0, 0, 0
    per_kernel: dict[str, tuple[int, int]] = {}
    for start, end, name in middle:
        gap = start - busy_until
        if gap > 0:
            idle += gap
            longest = max(longest, gap)
            between += gap if gap > GAP_BETWEEN_NS else 0
        busy_until = max(busy_until, end)
        launches, spent = per_kernel.get(name, (0, 0))
        per_kernel[name] = (launches + 1, spent + end - start)
    span = max(busy_until - middle[0][0], 1)
    ranked = sorted(per_kernel.items(), key=lambda item: -item[1][1])[:SHOWN_KERNELS]
    return Profile(
        span_ms=round(span / 1e6, 3),
        idle=round(idle / span, 4),
        idle_between=round(between / span, 4),
        longest_gap_us=round(longest / 1e3, 1),
        kernels=[
            (name[:120], launches, round(spent / 1e6, 4), round(spent / span, 4))
            for name, (launches, spent) in ranked
        ],
    )
