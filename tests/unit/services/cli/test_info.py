"""`outrider info`: what a report of a problem needs, without secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.cli.info import describe_installation
from outrider.shared.base.version import installed_version

RUNNER = CliRunner()


def test_it_shows_versions_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_TARGET_KV_TOKENS", "4096")
    text = RUNNER.invoke(cli.app, ["info"]).output
    assert text.startswith(f"outrider: {installed_version()}\n")
    assert "\npackages:\n  torch " in text
    assert "  OUTRIDER_TARGET_KV_TOKENS 4096\n" in text
    found = json.loads(RUNNER.invoke(cli.app, ["info", "--json"]).output)
    assert found["environment"]["OUTRIDER_TARGET_KV_TOKENS"] == "4096"
    assert found["packages"]["grpcio"]
    assert found["memory_gib"] > 0


def test_secrets_are_hidden() -> None:
    given = {
        "OUTRIDER_GATEWAY_API_KEY": "s3cret",
        "HF_TOKEN": "s3cret",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=s3cret",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://me:s3cret@host:4318",
        "AWS_ANYTHING": "s3cret",
        "OUTRIDER_URL": "http://host:8000",
    }
    shown = describe_installation(given)["environment"]
    assert "s3cret" not in json.dumps(shown)
    assert shown["OTEL_EXPORTER_OTLP_ENDPOINT"] == "https://***@host:4318"
    assert shown["OUTRIDER_URL"] == "http://host:8000"
    assert shown["HF_TOKEN"] == "***"
    assert "AWS_ANYTHING" not in shown


def test_gpus_come_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771 MiB, 3 MiB, 580.95.05'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_installation({})["gpus"] == ["0, NVIDIA H200, 143771 MiB, 3 MiB, 580.95.05"]
    program.write_text("#!/bin/sh\nexit 9\n")
    assert describe_installation({})["gpus"] == []
    assert "gpus: none\n" in RUNNER.invoke(cli.app, ["info"]).output


def test_it_imports_no_torch() -> None:
    program = (
        "import sys; from outrider.services.cli.info import describe_installation as describe; describe({}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
