"""What a measurement was made on, for the record beside the numbers."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("outrider", "torch", "grpcio", "triton")


def describe_machine() -> dict[str, Any]:
    """Return processor, cores (of them usable by this process), memory (GiB), GPUs and their ids, Python and the versions that matter."""
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
    """Return names, and digests of the ids by which one GPU is told from another of its kind."""
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(known.name, hashlib.sha256(str(known.uuid).encode()).hexdigest()[:8]) for known in found]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
