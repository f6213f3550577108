"""What a GPU's clocks and widths allow: the floors of the ceilings that `outrider bench roofline` measures."""

from __future__ import annotations

import torch

OPS_PER_CLOCK = {8: 2048, 9: 4096}
"""Operations of the matrix units of one multiprocessor in a clock, 16-bit operands, by major compute capability: 2 for each of 1024 or 2048
multiplications and additions. NVIDIA's tuning guides; GPUs that are not listed have no rated matrix rate here."""


def rated_bandwidth(device: torch.device) -> float | None:
    """Return bytes per second that the memory's clock and the bus's width give; None where the driver does not tell."""
    known = _properties(device)
    clock_khz, width = known.get("mem_clock_rate", 0), known.get("mem_bus_width", 0)
    return 2 * clock_khz * 1e3 * width / 8 or None


def rated_matrix_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return operations per second of all matrix units at the highest clock; None where it is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    known = _properties(device)
    per_clock = OPS_PER_CLOCK.get(torch.cuda.get_device_capability(device)[0], 0)
    if torch.cuda.get_device_capability(device) in ((8, 6), (8, 9)):
        per_clock //= 2  # of GPUs for graphics
    return known.get("multiprocessor_count", 0) * per_clock * known.get("sm_clock_rate", 0) * 1e3 or None


def _properties(device: torch.device) -> dict[str, int]:
    """Return what the driver tells: clocks in kHz, widths in bits."""
    if device.type != "cuda":
        return {}
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    found: dict[str, int] = driver.active.utils.get_device_properties(index)
    return found
