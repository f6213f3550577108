"""What the public functions and the Triton launches share: argument checks, grid arithmetic, the device to launch on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch


def expect(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None = None
) -> None:
    """Check a tensor's shape (None = any extent) and dtype.

    Raises:
        ValueError: Names the tensor, what it is and what it should be.
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
    """Check that a tensor is contiguous (the planes and tables that kernels address by hand).

    Raises:
        ValueError: Names the tensor.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, its strides are {tensor.stride()} for shape {list(tensor.shape)}"
        )


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n (1 for n < 1): Triton's block extents."""
    return 1 << max(0, n - 1).bit_length()


_zeros = False


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate what a Triton launch writes. One place, so that the tests can put guard bands round every buffer."""
    return (
        torch.zeros(shape, dtype=dtype, device=device)
        if _zeros
        else torch.empty(shape, dtype=dtype, device=device)
    )


@contextlib.contextmanager
def outputs_of_zeros() -> Iterator[None]:
    """Make what launches write zeros before: a launch may be left out inside the block, and others may take its output for indices."""
    global _zeros
    previous, _zeros = _zeros, True
    try:
        yield
    finally:
        _zeros = previous


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current: Triton launches on the current one, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@functools.cache
def _overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(tensor: torch.Tensor) -> dict[str, bool]:
    """Return the launch options of a kernel that may start while the one before it ends (programmatic dependent launch, Hopper on).

    Such a kernel takes ``PDL: tl.constexpr`` and keeps two rules:

    1. ``gdc_wait`` comes before the first read of what the kernel before it wrote, and before every write. What older kernels wrote is
       there already: every program waits, also one with nothing to do, so that a kernel is complete only after all kernels before it.
    2. ``gdc_launch_dependents`` comes just before the final stores: a trigger any earlier takes registers and shared memory from programs
       that still run (measured: slower).
    """
    return {"PDL": True, "launch_pdl": True} if _overlaps(tensor.device) else {"PDL": False}
