"""Finds out whether a GPU can still be used by this process after an error.

A CUDA context does not recover from some errors, such as an illegal memory access. After such an error, every
later call fails until the process ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.shared.base.errors import UnavailableError


def device_is_lost(device: torch.device) -> bool:
    """Return True if every CUDA call of this process fails. Call this after an error. It does not wait."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError:
        return True
    return False


def ending_if_lost(
    device: torch.device, end: Callable[[UnavailableError], None]
) -> Callable[[Exception], None]:
    """Return a handler of unexpected errors. The handler calls `end` if the GPU cannot be used any more.

    A supervisor then restarts the process. Without this check, a service would stay ready and fail every
    request.
    """

    def handle(error: Exception) -> None:
        if device_is_lost(device):
            end(UnavailableError(f"The GPU cannot be used any more after this error: {error}"))

    return handle
