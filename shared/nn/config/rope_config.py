"""Parses the rotary embedding parameters of a `config.json`: theta and the scaling rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from outrider.shared.nn.checkpoint.json_config import ConfigReader

DEFAULT_ROPE_THETA = 10000.0  # used when config.json has no rope_theta


class RopeKind(Enum):
    """Scaling rule of the rotary frequencies."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary position embedding (RoPE), including its scaling to longer contexts.

    Attributes:
        theta: Base of the frequencies.
        kind: The rule by which frequencies are scaled.
        factor: Divisor of the frequencies. With the linear rule, it applies to all frequencies. With the
            rules llama3 and yarn, it applies only to low frequencies.
        low_freq_factor, high_freq_factor: Only for llama3. Frequencies whose wavelength is above
            `original_max_position` divided by `low_freq_factor` are fully scaled. Frequencies whose
            wavelength is below `original_max_position` divided by `high_freq_factor` are not scaled. Between
            these two bounds, the scaling is interpolated.
        original_max_position: Context length before scaling. Only for llama3 and yarn.
        beta_fast, beta_slow, truncate: Only for yarn. Dimensions that rotate more than beta_fast times within
            the original context keep their frequency. Dimensions that rotate fewer than beta_slow times are
            fully scaled. These two limits correspond to two dimension indices. If `truncate` is True, the
            lower index is rounded down, and the higher index is rounded up.
        attention_factor: Factor by which cos and sin are multiplied. Only for yarn.
        softmax_factor: Factor by which the attention scale is multiplied. For DeepSeek, this factor is the
            square of YaRN's correction for the parameter mscale_all_dim.
    """

    theta: float = DEFAULT_ROPE_THETA
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    softmax_factor: float = 1.0


def parse_rope(reader: ConfigReader, default_theta: float = DEFAULT_ROPE_THETA) -> RopeConfig:
    """Parse config.json's ``rope_parameters`` (transformers 5), or its ``rope_theta`` and ``rope_scaling``.

    Raises:
        CheckpointError: The scaling rule is not supported, or a number is missing.
    """
    raw = reader.raw
    section = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    parameters = raw.get(section) or {}
    if not isinstance(parameters, Mapping):
        raise reader.error(section, f"must be an object, not {parameters!r}")
    inner = ConfigReader(parameters, f"{reader.source}: {section}")
    theta = inner.number("rope_theta", reader.number("rope_theta", default_theta))
    if float(raw.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise reader.error("partial_rotary_factor", "rotating only a part of each head is not supported")
    name = inner.text("rope_type", inner.text("type", RopeKind.DEFAULT.value))
    try:
        kind = RopeKind(name)
    except ValueError:
        supported = ", ".join(kind.value for kind in RopeKind)
        raise inner.error("rope_type", f"{name!r} is not supported; supported: {supported}") from None
    if kind is RopeKind.DEFAULT:
        return RopeConfig(theta=theta)
    if kind is RopeKind.LINEAR:
        return RopeConfig(theta=theta, kind=kind, factor=inner.number("factor"))
    if kind is RopeKind.YARN:
        return _parse_yarn(inner, reader, theta)
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.error("high_freq_factor", f"{high} must be above low_freq_factor {low}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=inner.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=inner.positive("original_max_position_embeddings"),
    )


def _parse_yarn(inner: ConfigReader, outer: ConfigReader, theta: float) -> RopeConfig:
    original = inner.positive(
        "original_max_position_embeddings", outer.positive("max_position_embeddings", 2048)
    )
    factor = inner.number("factor")
    mscale, mscale_all_dim = inner.raw.get("mscale") or 0.0, inner.raw.get("mscale_all_dim") or 0.0
    magnitude = (
        _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
        if mscale and mscale_all_dim
        else _magnitude(factor, 1.0)
    )
    return RopeConfig(
        theta=theta,
        kind=RopeKind.YARN,
        factor=factor,
        original_max_position=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=inner.flag("truncate", True),
        attention_factor=inner.number("attention_factor", magnitude),
        softmax_factor=_magnitude(factor, mscale_all_dim) ** 2,
    )


def _magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's correction of the attention temperature, for a context that is stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
