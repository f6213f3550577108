"""Which version of an op runs: the Triton kernel for CUDA tensors, the torch reference for everything else. Logged once each."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from enum import Enum

import torch

_log = logging.getLogger("outrider.kernels")


class Backend(Enum):
    """A version of an op."""

    REFERENCE = "reference"
    TRITON = "triton"


_forced: Backend | None = None
_announced: set[tuple[Backend, str]] = set()


def use_triton(tensor: torch.Tensor) -> bool:
    """Say whether the op that got `tensor` runs its Triton version: on CUDA yes, on a CPU no, unless `force_backend` says otherwise."""
    backend = _forced or (Backend.TRITON if tensor.is_cuda else Backend.REFERENCE)
    key = (backend, tensor.device.type)
    if key not in _announced:
        _announced.add(key)
        _log.info("kernels on %s run as %s%s", key[1], backend.value, " (forced)" if _forced else "")
    return backend is Backend.TRITON


@contextlib.contextmanager
def force_backend(backend: Backend | str) -> Iterator[None]:
    """Run every op inside the block by one backend, whatever the device. For tests (Triton's interpreter); not thread-safe.

    Args:
        backend: A `Backend` or its value, ``"triton"`` or ``"reference"``.
    """
    global _forced
    previous, _forced = _forced, Backend(backend)
    try:
        yield
    finally:
        _forced = previous
