"""Choice of the attention backend, explicit and logged once by the caller."""

from __future__ import annotations

from enum import Enum

import torch

from outrider.shared.attn.base import AttentionBackend
from outrider.shared.attn.flashinfer import FlashInferAttention
from outrider.shared.attn.reference import TorchAttention
from outrider.shared.attn.triton import KernelAttention
from outrider.shared.base.errors import ConfigurationError


class AttentionKind(Enum):
    """The backends by their name in settings."""

    AUTO = "auto"
    REFERENCE = "reference"
    TRITON = "triton"
    FLASHINFER = "flashinfer"


def create_backend(name: str | AttentionKind, device: torch.device | str) -> AttentionBackend:
    """Make a backend: ``auto`` is ``triton`` on CUDA and ``reference`` elsewhere.

    Raises:
        ConfigurationError: The name is unknown, or the backend cannot run here.
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
    """Whether planning asks the device for lengths: such a backend can be neither recorded into a graph nor run ahead."""
    return isinstance(backend, TorchAttention | FlashInferAttention)
