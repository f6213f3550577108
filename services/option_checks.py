"""What can be said of the values given to `outrider up` without torch and before any process is started.

The services check their settings once more; here a wrong value costs no second and is named by the flag that was typed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.shared.base.errors import ConfigurationError

if TYPE_CHECKING:
    from outrider.services.launch import StackOptions

MAX_PORT = 65535
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error")
# NVIDIA's driver, the same under WSL, and ROCm's, whose GPUs torch calls cuda too.
GPU_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")


def check_values(options: StackOptions, devices: Path = Path("/dev")) -> None:
    """Refuse values that no service would take.

    Args:
        options: What was asked for.
        devices: Where the kernel lists its devices.

    Raises:
        ConfigurationError: names the flag, the value and what is allowed.
    """
    if not 1 <= options.port < MAX_PORT:
        raise _wrong("--port", options.port, f"between 1 and {MAX_PORT - 1}", "; gRPC listens on the port after it")
    if not DEVICE.fullmatch(options.device):
        raise _wrong("--device", options.device, "auto, cpu, cuda or cuda:N")
    if options.device.startswith("cuda") and not any(next(devices.glob(name), None) for name in GPU_DEVICES):
        raise ConfigurationError(
            f"--device {options.device}: this machine shows no GPU; use --device cpu, or --device auto to take a GPU where there is one.",
            field="--device",
        )
    for flag, text, allowed in (("--dtype", options.dtype, DTYPES), ("--log-level", options.log_level, LOG_LEVELS)):
        if text not in allowed:
            raise _wrong(flag, text, f"one of {', '.join(allowed)}")
    for flag, value, cap_flag, cap in (
        ("--num-steps", options.num_steps, "--speculative-max-steps", options.max_steps),
        ("--topk", options.topk, "--speculative-max-topk", options.max_topk),
        ("--num-draft-tokens", options.num_draft_tokens, "--speculative-max-nodes", options.max_nodes),
    ):
        for name, number in ((flag, value), (cap_flag, cap)):
            if number is not None and number < 1:
                raise _wrong(name, number, "at least 1", "; --draft none serves without speculation")
        if value is not None and cap is not None and value > cap:
            raise ConfigurationError(f"{flag} {value} is above {cap_flag} {cap}; raise the cap or lower the default.", field=flag)
    for flag, number in (("--max-running-requests", options.max_running_requests), ("--kv-tokens", options.kv_tokens)):
        if number is not None and number < 1:
            raise _wrong(flag, number, "at least 1")
    if options.mem_fraction_static is not None and not 0 < options.mem_fraction_static < 1:
        raise _wrong("--mem-fraction-static", options.mem_fraction_static, "between 0 and 1, both excluded")


def _wrong(flag: str, value: object, allowed: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"{flag} must be {allowed}, not {value}{hint}.", field=flag)
