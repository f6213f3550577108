"""Enums of the target's settings: device, dtype, overlap, quantization, KV cache type, draft rounds."""

from __future__ import annotations

from enum import Enum


class Device(Enum):
    """Where the model runs. AUTO means CUDA if there is a GPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class OverlapSchedule(Enum):
    """Setting: whether the host launches a round before it has read the results of the previous round.

    ON also moves drafting to the target's device, if the drafter supports this. AUTO selects ON if the model
    runs on a GPU.
    """

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class ExchangePlacement(Enum):
    """Setting: how round states and trees travel between the target and a draft in another process.

    HOST sends them through the host. DEVICE exchanges them between the two devices
    (`shared.spec.resident`). AUTO selects DEVICE if the target uses a single GPU.
    """

    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"


class Quantization(Enum):
    """Precision of the layers' matrix products. NONE uses the data type of the model."""

    NONE = "none"
    FP8 = "fp8"


class KvCacheDtype(Enum):
    """Data type of K and V in the cache. AUTO uses the data type of the model."""

    AUTO = "auto"
    FP8_E4M3 = "fp8_e4m3"
