"""Flags shared by `outrider bench` commands, and the helpers that resolve their values.

The helpers resolve devices, dtypes, draft folders and lists of numbers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.services.hub.pair import DEMO_DRAFT, DEMO_TARGET, demo_name
from outrider.services.stack.launch import free_port
from outrider.services.stack.options import StackOptions, Transport
from outrider.shared.base.errors import ConfigurationError

Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with a `prompt` or `messages` field.", show_default="the embedded held-out prompts"
    ),
]
NumPrompts = Annotated[int, typer.Option(help="Number of prompts to use.")]
AnswerTokens = Annotated[int, typer.Option(help="Tokens per answer.")]
TargetDir = Annotated[
    Path | None,
    typer.Option(
        "--target",
        help="Model folder in Hugging Face layout.",
        show_default="the embedded demo model",
        metavar="DIR",
    ),
]
DraftDir = Annotated[
    str | None,
    typer.Option(
        "--draft",
        "--speculative-draft-model-path",
        help="Folder of the draft model.",
        show_default="the embedded head; none with another --target",
        metavar="DIR|none",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")]
StackTransport = Annotated[
    Transport,
    typer.Option(
        help="Transport of the stack that this command starts: auto (the choice of `outrider up`), grpc, "
        "ipc, inproc."
    ),
]
Dtype = Annotated[str, typer.Option(help="auto (bf16 on CUDA, fp32 on CPU), float32, bfloat16, float16.")]
Output = Annotated[
    Path | None,
    typer.Option(
        help="JSON file, or the folder to write it to.",
        show_default="bench-results/<benchmark>-<device>-<date>.json",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the JSON file if it exists.")]
Shape = Annotated[
    str,
    typer.Option(
        help="Named model shape, with random weights: llama3.1-8b, llama3.2-1b, qwen3-8b, granite-3.1-2b "
        "(computed by transformers' modules), tiny …"
    ),
]


def own_stack(
    target: Path | None, draft: str | None, transport: Transport, device: str, dtype: str
) -> StackOptions:
    """Return the launch options for services that the command starts itself.

    The gateway listens on a free port.
    """
    return StackOptions(
        target=target or DEMO_TARGET,
        model_id=demo_name(target),
        draft=draft_folder(target, draft),
        device=device,
        dtype=dtype,
        port=free_port(),
        transport=transport,
    )


def device_and_dtype(device: str, dtype: str) -> tuple[Any, Any]:
    """Return the torch device and dtype selected by `--device` and `--dtype`.

    Raises:
        ConfigurationError: A value is unknown, or this machine has no such device.
    """
    import torch

    try:
        where = (
            torch.device(device)
            if device != "auto"
            else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
    except RuntimeError:
        raise ConfigurationError(
            f"--device {device}: expected auto, cpu, cuda or cuda:N.", field="--device"
        ) from None
    if where.type not in ("cpu", "cuda") or (where.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigurationError(
            f"--device {device}: torch finds no such device on this machine. Use --device cpu.",
            field="--device",
        )
    if dtype == "auto":
        return where, torch.bfloat16 if where.type == "cuda" else torch.float32
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigurationError(
            f"--dtype {dtype}: expected auto, float32, bfloat16 or float16.", field="--dtype"
        )
    return where, getattr(torch, dtype)


def numbers(text: str, flag: str) -> list[int]:
    """Parse a comma-separated list of positive numbers.

    Raises:
        ConfigurationError: An entry of the list is not a number above 0.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigurationError(f"{flag} {text}: expected numbers above 0, separated by commas.", field=flag)
    return [int(part) for part in parts]


def choice(value: str, allowed: Sequence[str], flag: str) -> str:
    """Return the value of a flag that has a fixed set of values.

    Raises:
        ConfigurationError: The value is not in the set.
    """
    if value not in allowed:
        *others, last = allowed
        raise ConfigurationError(f"{flag} {value}: expected {', '.join(others)} or {last}.", field=flag)
    return value


def result_file(output: Path | None, name: str, device: str, force: bool) -> Path:
    """Return the path of the JSON file for the result of a run. Call this before anything is measured.

    Args:
        output: Value of `--output`: a .json file or a folder. With None, the file is in `bench-results`, and
            its name contains the date and the time.
        name: Name of the benchmark.
        device: The measured device, such as ``cpu``, ``cuda:1`` or ``remote``. If `output` is a folder, the
            file's name contains the device.
        force: Value of `--force`: True to overwrite an existing file.

    Raises:
        ConfigurationError: The file exists and `force` is False, or no file can be written there.
    """
    from outrider.bench.report.record import result_path

    path = result_path(output, name, device.split(":")[0])
    folder = next(parent for parent in path.parents if os.path.exists(parent))
    if not folder.is_dir():
        raise ConfigurationError(
            f"--output {output}: {folder} is a file. Give a file whose name ends in .json, or a folder.",
            field="--output",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"--output {output}: nothing can be written in {folder}. Choose another place with --output.",
            field="--output",
        )
    if path.is_dir():
        raise ConfigurationError(
            f"--output {output}: {path} is a folder. Choose another name.", field="--output"
        )
    if path.exists() and not force:
        raise ConfigurationError(
            f"{path} exists. Choose another file with --output, or pass --force to overwrite it.",
            field="--output",
        )
    return path


def draft_folder(target: Path | None, draft: str | None) -> Path | None:
    """Return the draft's folder. The embedded head is the default only if the target is the embedded one."""
    if draft is None:
        return DEMO_DRAFT if target is None else None
    return None if draft == "none" else Path(draft)
