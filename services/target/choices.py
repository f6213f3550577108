"""Enums of the target's settings: device, dtype, overlap, quantization, KV cache type, draft rounds."""

from __future__ import annotations

from enum import Enum


class Device(Enum):
    """Where the model runs. AUTO means CUDA if there is a GPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(Enum):
    """Type of weights and activations. AUTO means fp32 on a CPU and bf16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class OverlapSchedule(Enum):
    """Whether rounds stay on the device, each launched before the previous one is read.

    AUTO means on a GPU.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class RoundPlacement(Enum):
    """Where rounds with a draft in another process run: through the host, or on both devices.

    Rounds on both devices use `shared.spec.device`.
    AUTO keeps them on the device if the target uses a single GPU.
    """

    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


class Quantization(Enum):
    """Precision of the layers' matrix products. NONE means the model's type."""

    NONE = "none"
    FP8 = "fp8"


class KvCacheDtype(Enum):
    """Type of K and V in the cache. AUTO means the model's type."""

    AUTO = "auto"
    FP8_E4M3 = "fp8_e4m3"
