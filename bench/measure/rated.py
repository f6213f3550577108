"""A GPU's rated memory bandwidth and matrix rate, computed from its clocks, bus width and multiprocessors.

`outrider bench roofline` compares each rate that it measures with the rated value.
"""

from __future__ import annotations

import torch

OPS_PER_CLOCK = {8: 2048, 9: 4096}
"""Matrix operations of one multiprocessor per clock with 16-bit operands, by major compute capability.

Depending on the compute capability, a multiprocessor does 1024 or 2048 multiply-adds per clock, each of which
counts as 2 operations. The numbers are from NVIDIA's tuning guides. For a GPU whose compute capability is not
listed, there is no rated matrix rate.
"""


def rated_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second that the memory clock and the bus width allow.

    Returns None if the driver does not report the clock or the width.
    """
    known = _properties(device)
    clock_khz, width = known.get("mem_clock_rate", 0), known.get("mem_bus_width", 0)
    return 2 * clock_khz * 1e3 * width / 8 or None


def rated_matrix_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the operations per second of all matrix units at the highest clock; None if unknown."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    known = _properties(device)
    per_clock = OPS_PER_CLOCK.get(torch.cuda.get_device_capability(device)[0], 0)
    if torch.cuda.get_device_capability(device) in ((8, 6), (8, 9)):
        per_clock //= 2  # a graphics GPU has half the rate of a server GPU of the same generation
    return known.get("multiprocessor_count", 0) * per_clock * known.get("sm_clock_rate", 0) * 1e3 or None


def _properties(device: torch.device) -> dict[str, int]:
    """Return the driver's device properties: clocks in kHz, widths in bits."""
    if device.type != "cuda":
        return {}
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    found: dict[str, int] = driver.active.utils.get_device_properties(index)
    return found
