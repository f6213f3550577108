"""`outrider bench roofline`: measures a machine's limits (memory, matrix units, launches, the host-GPU bus).

These limits are called ceilings. Other benchmarks measure them again in each run, and compute floors (best
possible values) from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from outrider.bench.measure.clock import Times, measure, measure_eager
from outrider.bench.measure.rated import rated_bandwidth, rated_matrix_rate
from outrider.bench.report.record import Result, Row, show_and_save
from outrider.shared.obs.progress import Progress

GB = 1e9
FASTEST = "p10"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured rates of a machine from which floors (best possible times) are computed.

    Attributes:
        read_bandwidth: Bytes per second that one kernel reads from device memory.
        matrix_rate: Floating-point operations per second of a large matrix product in the serving dtype.
    """

    read_bandwidth: float
    matrix_rate: float

    def seconds(self, nbytes: float, flops: float = 0.0) -> float:
        """Return the minimum time to read these bytes while doing these operations in parallel."""
        return max(nbytes / self.read_bandwidth, flops / self.matrix_rate)

    def bound(self, nbytes: float, flops: float = 0.0) -> str:
        """Return ``bytes`` or ``flops``, whichever takes longer."""
        return "bytes" if nbytes / self.read_bandwidth >= flops / self.matrix_rate else "flops"


@dataclass(frozen=True, slots=True)
class RooflineOptions:
    """Options of the measurement. Its fields are the flags of `outrider bench roofline`."""

    device: torch.device
    dtype: torch.dtype
    output: Path | None
    small: bool = False
    """True for small sizes, which tests on a CPU use."""


def run_roofline(options: RooflineOptions) -> int:
    """Measure the ceilings, print the table and save the result. Returns the exit code."""
    rows = roofline_rows(options)
    settings = {"device": str(options.device), "dtype": _name(options.dtype)}
    return show_and_save(Result("roofline", settings, rows), options.output, ("p10", "p90"))


def roofline_rows(options: RooflineOptions) -> list[Row]:
    """Return one table row for each measured limit (ceiling) of the machine.

    A row compares the measured value with a best value, its floor. The floor of a rate is the GPU's rated
    value. The floor of an eager launch is the time of the kernel itself. For every other measurement, the
    floor is the 10th percentile of its own samples.
    """
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        ("device memory", partial(_memory_rows, options)),
        *(
            (f"matrix product {size}³", partial(_matrix_rows, options, size))
            for size in _matrix_sizes(options.device, options.small)
        ),
        ("launches", partial(_launch_rows, options.device)),
    ]
    if options.device.type == "cuda":
        nbytes = min(_working_set(options.device, options.small), 1 << 28)
        parts.append(("bus", partial(_bus, options.device, nbytes)))
    rows: list[Row] = []
    # A thread that redraws the bar would disturb the measurement.
    with Progress("roofline", len(parts), still=True) as progress:
        for number, (step, measured) in enumerate(parts):
            progress.tell(number, step=step)
            rows += measured()
    return rows


def measure_ceilings(device: torch.device, dtype: torch.dtype, small: bool = False) -> Ceilings:
    """Measure the ceilings from which floors are computed. This takes about a second on a GPU."""
    nbytes = _working_set(device, small)
    size = _matrix_sizes(device, small)[-1]
    options = RooflineOptions(device, dtype, None, small)
    return Ceilings(nbytes / _read(device, nbytes).p10, 2 * size**3 / _matmul(options, size).median)


def _working_set(device: torch.device, small: bool) -> int:
    """Return a number of bytes far larger than the caches."""
    return 1 << 20 if small else 4 << 30 if device.type == "cuda" else 1 << 28


def _matrix_sizes(device: torch.device, small: bool) -> tuple[int, ...]:
    """Return the sizes of the matrix products. The largest product takes minutes on two CPU cores."""
    return (128,) if small else (4096, 8192) if device.type == "cuda" else (1024, 2048)


def _memory_rows(options: RooflineOptions) -> list[Row]:
    device, nbytes = options.device, _working_set(options.device, options.small)
    bandwidth = rated_bandwidth(device)
    copy = _copy(device, nbytes)
    read = _read(device, nbytes)
    return [
        _rate("device copy, read + write", 2 * nbytes / GB, copy, "GB/s", bandwidth and bandwidth / GB),
        _rate("device read", nbytes / GB, read, "GB/s", bandwidth and bandwidth / GB),
    ]


def _matrix_rows(options: RooflineOptions, size: int) -> list[Row]:
    case = f"matrix product {size}³ {_name(options.dtype)}"
    rate = rated_matrix_rate(options.device, options.dtype)
    return [_rate(case, 2 * size**3 / 1e12, _matmul(options, size), "TFLOP/s", rate and rate / 1e12)]


def _launch_rows(device: torch.device) -> list[Row]:
    inside = measure(_small_kernel(device, 100), device, copies=100)
    eager = measure_eager(_small_kernel(device), device)
    return [
        _time("launch of a small kernel, eager", eager, inside.median, "the kernel in a graph"),
        _time("small kernel inside a graph", inside),
    ]


def _copy(device: torch.device, nbytes: int) -> Times:
    source = _noise(nbytes, device)
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), device)


def _read(device: torch.device, nbytes: int) -> Times:
    source = _noise(nbytes, device).view(torch.float32)
    if device.type != "cuda":
        return measure(source.sum, device)
    from outrider.bench.measure.ceiling_kernels import read_all

    return measure(lambda: read_all(source), device)


def _matmul(options: RooflineOptions, size: int) -> Times:
    a, b = (torch.randn(size, size, device=options.device).to(options.dtype) for _ in range(2))
    return measure(lambda: a @ b, options.device, sample_s=0.02)


def _small_kernel(device: torch.device, times: int = 1) -> Callable[[], None]:
    x = torch.zeros(32, device=device)

    def work() -> None:
        for _ in range(times):
            x.add_(1.0)

    return work


def _bus(device: torch.device, nbytes: int) -> list[Row]:
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    small_host, small_there = host[:4096], there[:4096]
    up = measure_eager(lambda: there.copy_(host, non_blocking=True), device, samples=5, repeat=4)
    down = measure_eager(lambda: host.copy_(there, non_blocking=True), device, samples=5, repeat=4)

    def read_back() -> None:
        small_host.copy_(small_there, non_blocking=True)
        torch.cuda.synchronize(device)

    return [
        _rate("host to device, pinned", nbytes / GB, up, "GB/s"),
        _rate("device to host, pinned", nbytes / GB, down, "GB/s"),
        _time("4 KiB to the host and wait", measure_eager(read_back, device)),
    ]


def _noise(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return random 32-bit words that are fp32 numbers from 0.5 to 1.

    Zeros would be unsuitable because memories and links may compress them, and denormal numbers may be slower
    to process.
    """
    return torch.randint(0x3F000000, 0x3F800000, (nbytes // 4,), dtype=torch.int32, device=device)


def _rate(case: str, amount: float, times: Times, unit: str, rated: float | None = None) -> Row:
    floor, of = (amount / times.p10, FASTEST) if rated is None else (rated, "rated")
    return Row(
        case,
        amount / times.median,
        unit,
        floor,
        of,
        {"p10": round(amount / times.p90, 3), "p90": round(amount / times.p10, 3)},
    )


def _time(case: str, times: Times, floor_s: float | None = None, floor_of: str = FASTEST) -> Row:
    floor = times.p10 if floor_s is None else floor_s
    more = {"p10": round(times.p10 * 1e6, 3), "p90": round(times.p90 * 1e6, 3)}
    return Row(case, times.median * 1e6, "us", floor * 1e6, floor_of, more)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
