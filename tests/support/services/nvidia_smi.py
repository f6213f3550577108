"""A fake of NVIDIA's command `nvidia-smi`."""

from __future__ import annotations

from pathlib import Path

import pytest


def fake_nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, output: str) -> Path:
    """Put a fake nvidia-smi first on PATH, and return the file in which it records its arguments."""
    command = folder / "nvidia-smi"
    command.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\necho "{output}"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder / "asked"
