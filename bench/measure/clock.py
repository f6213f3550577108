"""Times short pieces of work: with CUDA events around graph replays on a GPU, with the wall clock on a CPU.

A warm-up comes first. The results are medians and percentiles of the samples that follow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TimedWork = Callable[[], object]

SAMPLES = 15
SAMPLE_S = 0.004
"""Approximate duration of a sample, in seconds. A sample repeats the work until this time is reached."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds for one repetition: the median and percentiles over all samples."""

    median: float
    p10: float
    p90: float
    samples: int


def summarise_times(seconds: Sequence[float]) -> Times:
    """Return the summary of the measured seconds. There must be at least one measurement."""
    return Times(statistics.median(seconds), percentile(seconds, 10), percentile(seconds, 90), len(seconds))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation. Every percentile of a single value is that value."""
    ranked = sorted(values)
    at = (len(ranked) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (at - low)


def measure(
    work: TimedWork,
    device: torch.device,
    *,
    copies: int = 1,
    samples: int = SAMPLES,
    sample_s: float = SAMPLE_S,
) -> Times:
    """Return how long `work` takes on the device.

    Args:
        work: Enqueues the work without waiting for it. On a GPU, `work` is captured into a CUDA graph, so
            that launch overhead on the host is not counted.
        device: Device that runs the work.
        copies: Number of repetitions within one call of `work`. The repetitions use distinct data, so that
            caches do not help.
        samples: Number of samples.
        sample_s: Minimum duration of a sample, in seconds.
    """
    if device.type != "cuda":
        return _scaled(_measure_cpu(work, samples, sample_s), copies)
    with torch.cuda.device(device):
        return _scaled(_measure_graph(work, samples, sample_s), copies)


def measure_eager(
    work: TimedWork, device: torch.device, *, samples: int = SAMPLES, repeat: int = 100
) -> Times:
    """Return the time of one call of `work`, including its launch. A sample makes `repeat` calls in a row."""
    seconds = []
    for _ in range(samples):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(repeat):
            work()
        synchronise(device)
        seconds.append((time.perf_counter() - started) / repeat)
    return summarise_times(seconds)


def synchronise(device: torch.device) -> None:
    """Wait until a GPU is idle. Do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_cpu(work: TimedWork, samples: int, sample_s: float) -> list[float]:
    work()
    started = time.perf_counter()
    work()
    repeat = max(1, int(sample_s / max(time.perf_counter() - started, 1e-9)))
    seconds = []
    for _ in range(samples):
        started = time.perf_counter()
        for _ in range(repeat):
            work()
        seconds.append((time.perf_counter() - started) / repeat)
    return seconds


def _measure_graph(work: TimedWork, samples: int, sample_s: float) -> list[float]:
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def timed(repeat: int) -> float:
        begin.record()
        for _ in range(repeat):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeat / 1e3

    repeat = max(2, min(2000, int(sample_s / max(timed(3), 1e-7))))
    timed(repeat)
    return [timed(repeat) for _ in range(samples)]


def _scaled(seconds: Sequence[float], copies: int) -> Times:
    return summarise_times([value / copies for value in seconds])
