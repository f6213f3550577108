"""`outrider info`: versions, GPUs, caches and settings of this machine, for problem reports."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.shared.base.version import installed_version

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "flashinfer-python"),
    *("grpcio", "protobuf", "fastapi", "uvicorn", "pydantic", "numpy", "opentelemetry-sdk"),
)
SECRET = re.compile(r"(^|_)(KEYS?|TOKEN|SECRETS?|PASSWORD|HEADERS)(_|$)")
"""Names of variables whose values are hidden. ``…_TOKENS`` does not match, because it is a number of
tokens."""
PREFIXES = ("OUTRIDER_", "CUDA_", "NCCL_", "TRITON_", "HF_", "OTEL_", "OMP_")
QUERY_TIMEOUT_S = 20.0
_USER = re.compile(r"//[^/@\s]*@")
"""User and password in a URL."""


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, GPUs, caches and settings of this machine. Values of keys and tokens are hidden."""
    found = describe_installation(os.environ)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for heading, content in found.items():
        if not isinstance(content, Mapping | list):
            typer.echo(f"{heading}: {content}")
            continue
        typer.echo(f"{heading}:" if content else f"{heading}: none")
        lines = (
            content if isinstance(content, list) else [f"{name} {value}" for name, value in content.items()]
        )
        for line in lines:
            typer.echo(f"  {line}")


def describe_installation(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the description of this machine. Do not import torch or CUDA, because importing takes seconds.

    Args:
        environment: The environment variables.
    """
    return {
        "outrider": installed_version(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "caches": {
            "kernels": environment.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton"),
            "models": environment.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface"),
        },
        "environment": {
            name: "***" if SECRET.search(name) else _USER.sub("//***@", value)
            for name, value in sorted(environment.items())
            if name.startswith(PREFIXES)
        },
    }


def _gpus() -> list[str]:
    """Return name, memory and driver of each GPU, as nvidia-smi prints them. Empty without nvidia-smi."""
    command = [
        "nvidia-smi",
        "--query-gpu=index,name,memory.total,memory.used,driver_version",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
