"""Creates the attention backend that the settings name."""

from __future__ import annotations

from enum import Enum

import torch

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.flashinfer import FlashInferAttention
from outrider.shared.attn.reference import TorchAttention
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.errors import ConfigurationError


class AttentionKind(Enum):
    """The backends and their names in the settings."""

    AUTO = "auto"
    REFERENCE = "reference"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


def create_backend(name: str | AttentionKind, device: torch.device | str) -> AttentionBackend:
    """Create a backend. The name ``auto`` selects ``triton`` on CUDA and ``reference`` elsewhere.

    Raises:
        ConfigurationError: The name is unknown, or the backend cannot run on this device.
    """
    try:
        kind = AttentionKind(name)
    except ValueError:
        names = ", ".join(kind.value for kind in AttentionKind)
        raise ConfigurationError(
            f"unknown attention backend {name!r}; choose one of {names}", field="attention_backend"
        ) from None
    if kind is AttentionKind.AUTO:
        kind = AttentionKind.TRITON if torch.device(device).type == "cuda" else AttentionKind.REFERENCE
    if kind is AttentionKind.REFERENCE:
        return TorchAttention()
    return FlashInferAttention(device) if kind is AttentionKind.FLASHINFER else KernelAttention()


def waits_for_device(backend: AttentionBackend) -> bool:
    """Return True if the backend reads lengths from the device when it plans a step.

    Such a backend cannot be captured into a CUDA graph. The host also cannot enqueue a pass with this backend
    before earlier passes are done.
    """
    return isinstance(backend, TorchAttention | FlashInferAttention)
