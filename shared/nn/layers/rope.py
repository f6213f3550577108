"""Rotary position embedding in the layout of Hugging Face: dimensions i and i + head_dim / 2 form a pair."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from outrider.kernels.rope_store import rope_angles
from outrider.shared.nn.config.rope_config import RopeConfig, RopeKind


class Rotation(NamedTuple):
    """``cos`` and ``sin`` of a step's rows, ``[rows, 1, head_dim]``. The first half of `sin` is negated."""

    cos: torch.Tensor
    sin: torch.Tensor


class RotaryEmbedding:
    """Rotary position embedding (RoPE): turns the positions of rows into rotations.

    The angles are computed in each forward pass and not read from a table, so any position can be used.

    Args:
        config: Base and scaling rule of the frequencies.
        head_dim: Width of a head.
        device: Device of the positions.
        dtype: Type of cos and sin. Angles are computed in fp32.
    """

    def __init__(
        self, config: RopeConfig, head_dim: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        frequencies = inverse_frequencies(config, head_dim)
        self._frequencies = torch.cat([frequencies, frequencies]).to(device)  # [head_dim]
        sign = torch.ones(head_dim)
        sign[: head_dim // 2] = -1
        self._sign = sign.to(device)
        self._factor = config.attention_factor
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of ``positions [rows]`` (any integer type)."""
        if self._frequencies.is_cuda:
            return Rotation(*rope_angles(positions, self._frequencies, self._factor, self._dtype))
        angles = (positions.to(torch.float32)[:, None] * self._frequencies)[:, None, :]  # [rows, 1, head_dim]
        cos, sin = angles.cos(), angles.sin() * self._sign
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return Rotation(cos.to(self._dtype), sin.to(self._dtype))


def rotate(heads: torch.Tensor, rotation: Rotation) -> None:
    """Rotate ``heads [rows, n, head_dim]`` in place."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(rotation.cos).addcmul_(swapped, rotation.sin)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the scaled frequencies of a rotary embedding, ``[head_dim / 2] fp32``, in radians per position.

    Sources: the llama3 rule is from the Llama 3.1 release; see `RopeConfig` for its three ranges of
    wavelengths. The yarn rule is from arXiv 2309.00071, section 3.2.
    """
    frequencies = 1.0 / (config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if config.kind is RopeKind.DEFAULT:
        return frequencies
    if config.kind is RopeKind.LINEAR:
        return frequencies / config.factor
    if config.kind is RopeKind.YARN:
        kept = 1 - _yarn_ramp(config, head_dim)
        return kept * frequencies + (1 - kept) * frequencies / config.factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (config.original_max_position / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    # High frequencies get 1 and are not scaled. Low frequencies get 0 and are fully scaled.
    kept = smooth.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / config.factor


def _yarn_ramp(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return ``[head_dim / 2]``: 0 for frequencies that are not scaled, 1 for those that are fully scaled."""

    def dimension(turns: float) -> float:
        """Return the (fractional) dimension that rotates `turns` times within the original context."""
        return (
            head_dim
            * math.log(config.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
