"""Selects the version of an op that runs: Triton for CUDA tensors, the torch reference for other tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from enum import Enum

import torch

_log = logging.getLogger("outrider.kernels")


class Backend(Enum):
    """Version of an op: Triton kernels or the torch reference."""

    REFERENCE = "reference"
    TRITON = "triton"


_forced: Backend | None = None
_announced: set[tuple[Backend, str]] = set()  # choices that were logged already


def use_triton(tensor: torch.Tensor) -> bool:
    """Return True if an op on `tensor` runs its Triton version, or False if it runs its reference version.

    CUDA tensors use Triton, and CPU tensors use the reference. `force_backend` overrides this rule. The
    choice is logged once per device type.
    """
    backend = _forced or (Backend.TRITON if tensor.is_cuda else Backend.REFERENCE)
    key = (backend, tensor.device.type)
    if key not in _announced:
        _announced.add(key)
        _log.info("kernels on %s run as %s%s", key[1], backend.value, " (forced)" if _forced else "")
    return backend is Backend.TRITON


@contextlib.contextmanager
def force_backend(backend: Backend | str) -> Iterator[None]:
    """Context manager in which every op uses the given backend on any device.

    Tests use this function to run the Triton kernels in Triton's interpreter. It is not thread-safe.

    Args:
        backend: A `Backend` or its value, ``"triton"`` or ``"reference"``.
    """
    global _forced
    previous, _forced = _forced, Backend(backend)
    try:
        yield
    finally:
        _forced = previous
