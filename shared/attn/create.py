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
    """Create an attention backend by name. ``auto`` selects ``triton`` on CUDA and ``reference`` elsewhere.

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
    """Return True if the attention backend waits for the device when it plans a forward pass.

    Such a backend reads sequence lengths from the device. It therefore cannot be captured into a CUDA graph.
    The host cannot enqueue a pass with such a backend before all earlier passes have finished.
    """
    return isinstance(backend, TorchAttention | FlashInferAttention)
