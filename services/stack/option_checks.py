"""Checks the values given to `outrider up` before any process starts and without importing torch.

The services check their own settings again. This earlier check reports a wrong value immediately, and its
message contains the flag that the user typed.
"""

from __future__ import annotations

import re
from pathlib import Path

from outrider.services.stack.mps import mps_program
from outrider.services.stack.options import StackOptions
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import TOKEN_MAP_SUFFIXES, Algorithm

MAX_PORT = 65535
DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_NUM_STEPS, DEFAULT_TOPK, DEFAULT_NUM_DRAFT_TOKENS = 5, 4, 16
DEFAULT_MAX_STEPS, DEFAULT_MAX_TOPK, DEFAULT_MAX_NODES = 16, 16, 128
DEFAULT_MAX_SESSIONS = 256
"""The DEFAULT constants are copies of the services' defaults, because importing the services would load
torch.

A test compares the copies with the originals.
"""
NVIDIA_DEVICE = "nvidia[0-9]*"
# Device files of NVIDIA's driver, of that driver under WSL, and of ROCm. torch calls ROCm GPUs "cuda" too.
GPU_DEVICES = (NVIDIA_DEVICE, "dxg", "kfd")


def check_values(options: StackOptions, devices: Path = Path("/dev")) -> None:
    """Reject values that no service accepts.

    Args:
        options: Options of `outrider up`.
        devices: Folder of the device files of the Linux kernel, usually ``/dev``.

    Raises:
        ConfigurationError: A value is invalid. The message names the flag, the value and the allowed values.
    """
    if not 1 <= options.port < MAX_PORT:
        raise _wrong("--port", options.port, f"between 1 and {MAX_PORT - 1}", "; gRPC uses the next port")
    if not 0 <= options.grpc <= MAX_PORT or options.grpc == options.port:
        raise _wrong("--grpc-port", options.grpc, f"0 or between 1 and {MAX_PORT}, and not --port")
    for flag, device in (("--device", options.device), ("--draft-device", options.draft_device)):
        if not DEVICE.fullmatch(device):
            raise _wrong(flag, device, "auto, cpu, cuda or cuda:N")
    if options.draft_device != "auto" and (options.transport.value == "inproc" or not options.speculates):
        why = "runs in the target's process" if options.speculates else "does not exist"
        raise ConfigurationError(
            f"--draft-device {options.draft_device} has no effect because the draft {why}. Remove it, or "
            "give --transport ipc and a --draft.",
            field="--draft-device",
        )
    if options.device.startswith("cuda") and not any(next(devices.glob(name), None) for name in GPU_DEVICES):
        raise ConfigurationError(
            f"--device {options.device}: this machine has no GPU. Use --device cpu, or --device auto to use "
            "a GPU only if there is one.",
            field="--device",
        )
    for flag, text, allowed in (
        ("--dtype", options.dtype, DTYPES),
        ("--log-level", options.log_level, LOG_LEVELS),
    ):
        if text not in allowed:
            raise _wrong(flag, text, f"one of {', '.join(allowed)}")
    _check_shape(options)
    _check_files(options)
    if options.transport.value != "auto" and not options.speculates:
        raise ConfigurationError(
            f"--transport {options.transport.value} has no effect because there is no draft. Remove it, or "
            "give a --draft or a --speculative-algorithm that drafts.",
            field="--transport",
        )
    if options.mps:
        _check_mps(options, devices)
    for flag, number in (
        ("--max-running-requests", options.max_running_requests),
        ("--kv-tokens", options.kv_tokens),
        ("--tp", options.tp),
    ):
        if number is not None and number < 1:
            raise _wrong(flag, number, "at least 1")
    if options.mem_fraction_static is not None and not 0 < options.mem_fraction_static < 1:
        raise _wrong("--mem-fraction-static", options.mem_fraction_static, "between 0 and 1, both exclusive")


def _check_mps(options: StackOptions, devices: Path) -> None:
    """Reject --mps unless two processes share an NVIDIA GPU and MPS is installed."""
    check_mps_device(options.device, devices)
    if not options.speculates or options.algorithm is Algorithm.NGRAM or options.transport.value == "inproc":
        raise _no_mps(
            "needs a target and a draft in two processes on one GPU, but only the target would run there"
        )
    mps_program()


def check_mps_device(device: str, devices: Path = Path("/dev")) -> None:
    """Reject the flag --mps if the processes of the stack do not share an NVIDIA GPU.

    Args:
        device: Device of the processes, in the notation of `--device`.
        devices: Folder of the device files of the Linux kernel, usually ``/dev``.

    Raises:
        ConfigurationError: There is no NVIDIA GPU, or the processes do not use one.
    """
    if device == "cpu":
        raise _no_mps("shares a GPU, but --device cpu uses none")
    if next(devices.glob(NVIDIA_DEVICE), None) is None:
        raise _no_mps("shares an NVIDIA GPU, but this machine has none")


def _no_mps(why: str) -> ConfigurationError:
    return ConfigurationError(f"--mps {why}. Remove --mps.", field="--mps")


def _check_shape(options: StackOptions) -> None:
    """Check the default tree shape against the limits. Flags that are missing have the services' defaults."""
    for flag, value, default, cap_flag, cap, default_cap in (
        (
            "--num-steps",
            options.num_steps,
            DEFAULT_NUM_STEPS,
            "--speculative-max-steps",
            options.max_steps,
            DEFAULT_MAX_STEPS,
        ),
        ("--topk", options.topk, DEFAULT_TOPK, "--speculative-max-topk", options.max_topk, DEFAULT_MAX_TOPK),
        (
            *("--num-draft-tokens", options.num_draft_tokens, DEFAULT_NUM_DRAFT_TOKENS),
            *("--speculative-max-nodes", options.max_nodes, DEFAULT_MAX_NODES),
        ),
    ):
        for name, number in ((flag, value), (cap_flag, cap)):
            if number is not None and number < 1:
                raise _wrong(name, number, "at least 1", "; --draft none serves without speculation")
        asked, most = (default if value is None else value), (default_cap if cap is None else cap)
        if asked > most:
            raise ConfigurationError(
                f"{_with_origin(flag, asked, value)} exceeds {_with_origin(cap_flag, most, cap)}. "
                "Raise the limit or lower the default.",
                field=flag,
            )
    num_steps = options.num_steps or DEFAULT_NUM_STEPS
    if (
        options.topk == 1
        and options.num_draft_tokens is not None
        and options.num_draft_tokens > num_steps + 1
    ):
        raise ConfigurationError(
            f"--num-draft-tokens {options.num_draft_tokens} is too large: with --topk 1, a draft is a "
            f"chain of num_steps + 1 = {num_steps + 1} nodes. Lower it, or raise --num-steps or --topk.",
            field="--num-draft-tokens",
        )


def _check_files(options: StackOptions) -> None:
    """Reject a token map or an n-gram corpus that does not exist, or that the chosen draft would not use."""
    for flag, path in (
        ("--speculative-token-map", options.token_map),
        ("--ngram-corpus", options.ngram_corpus),
    ):
        if path is not None and not path.is_file():
            raise ConfigurationError(f"{flag} {path}: there is no such file.", field=flag)
    if options.token_map is not None and options.token_map.suffix not in TOKEN_MAP_SUFFIXES:
        raise _wrong(
            "--speculative-token-map", options.token_map, f"a file of type {', '.join(TOKEN_MAP_SUFFIXES)}"
        )
    if options.token_map is not None and (options.algorithm is Algorithm.NGRAM or not options.speculates):
        why = (
            "n-grams have no vocabulary of their own"
            if options.algorithm is Algorithm.NGRAM
            else "there is no draft"
        )
        raise ConfigurationError(
            f"--speculative-token-map: {why}. Remove it, or give a --draft whose vocabulary it restricts.",
            field="--speculative-token-map",
        )
    if options.ngram_corpus is not None and options.algorithm is not Algorithm.NGRAM:
        raise ConfigurationError(
            f"--ngram-corpus {options.ngram_corpus} is used by NGRAM only. Remove it, or add "
            "--speculative-algorithm NGRAM.",
            field="--ngram-corpus",
        )


def _with_origin(flag: str, value: int, given: int | None) -> str:
    return f"{flag} {value}" + (" (the default)" if given is None else "")


def _wrong(flag: str, value: object, allowed: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"{flag} must be {allowed}, not {value}{hint}.", field=flag)
