"""Describes the machine of a measurement for the result file: processor, memory, GPUs and versions."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("outrider", "torch", "grpcio", "triton")


def describe_machine() -> dict[str, Any]:
    """Return a description of this machine for result files.

    The description contains the processor, the number of cores, the number of cores that this process may
    use, and the memory in GiB. It also contains the GPUs with their ids, and the versions of Python and of
    the packages that affect figures.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "cores_used": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [name for name, _ in _gpus()],
        "gpu_ids": [identifier for _, identifier in _gpus()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _gpus() -> list[tuple[str, str]]:
    """Return the name of each GPU and a short digest of its id, to distinguish GPUs of one model."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(known.name, hashlib.sha256(str(known.uuid).encode()).hexdigest()[:8]) for known in found]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
