"""Every service chooses how gRPC waits before anything imports gRPC."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from outrider.services.cli import entrypoints

def watch_sockets():
    print("gRPC is imported" if "grpc._cython.cygrpc" in sys.modules else "in time")
    raise SystemExit

entrypoints.watch_sockets = watch_sockets
entrypoints.run_{service}(None)
"""


@pytest.mark.parametrize("service", ["gateway", "target", "draft"])
def test_sockets_are_watched_before_grpc_is_imported(service: str) -> None:
    run = [sys.executable, "-c", SCRIPT.format(service=service)]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "in time"
