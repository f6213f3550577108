"""Helpers for public ops and Triton launches: argument checks, grid sizes, allocation, device choice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch


def expect(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None = None
) -> None:
    """Check a tensor's shape and dtype. None in the shape matches any extent.

    Raises:
        ValueError: The shape or dtype differs. The message names the tensor, the actual value and the
            expected value.
    """
    actual = tensor.shape
    if len(actual) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, actual, strict=True)
    ):
        wanted = ", ".join("*" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} has shape {list(actual)}, expected [{wanted}]")
    if dtype is not None and tensor.dtype is not dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, expected {dtype}")


def expect_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is contiguous. Kernels compute addresses on this assumption.

    Raises:
        ValueError: The tensor is not contiguous. The message names the tensor.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous; its strides are {tensor.stride()} for shape {list(tensor.shape)}"
        )


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two >= n (1 for n < 1). Triton needs block extents that are powers of two."""
    return 1 << max(0, n - 1).bit_length()


LANES = 32
"""Threads of a warp. A program of one warp takes as long for a block of fewer elements as for this many."""


def lanes(n: int) -> int:
    """Return the least power of two that is at least `n` and at least `LANES`.

    Kernels whose programs have one warp use this size for their blocks. Fewer sizes mean fewer compiled
    variants of a kernel.
    """
    return max(LANES, next_power_of_2(n))


_zeros = False


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor that a Triton launch writes.

    All launches allocate here, so that the tests can put guard bands around every buffer.
    """
    return (
        torch.zeros(shape, dtype=dtype, device=device)
        if _zeros
        else torch.empty(shape, dtype=dtype, device=device)
    )


@contextlib.contextmanager
def outputs_of_zeros() -> Iterator[None]:
    """Context manager in which `_launch.empty` returns tensors of zeros instead of uninitialised tensors.

    The package `ahead` skips kernel launches inside this block, so outputs are not written. A later operation
    may use such an output as indices. Zeros are valid indices.
    """
    global _zeros
    previous, _zeros = _zeros, True
    try:
        yield
    finally:
        _zeros = previous


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current device.

    Triton launches kernels on the current device, which may differ from the tensor's device.
    """
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.cache
def _overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(tensor: torch.Tensor) -> dict[str, bool]:
    """Return the launch options of a Triton kernel that may start before the previous kernel ends.

    This is programmatic dependent launch (PDL), available on GPUs from Hopper on. Such a kernel has the
    parameter ``PDL: tl.constexpr`` and follows two rules:

    1. Every program calls ``gdc_wait``, before it reads data of the previous kernel and before it writes. A
       kernel therefore ends only after all earlier kernels have ended. When a kernel starts, the results of
       all kernels before the previous one are complete.
    2. ``gdc_launch_dependents`` comes just before the final stores. An earlier call measured slower, because
       the next kernel then takes registers and shared memory from this kernel.
    """
    return {"PDL": True, "launch_pdl": True} if _overlaps(tensor.device) else {"PDL": False}
