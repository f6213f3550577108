"""The gateway as a process: imports, start-up, start-up errors and shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fake_target import FakeTarget, Script
from gateway_thread import free_port

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys
from outrider.services.gateway.app import run
from outrider.services.gateway.settings import GatewaySettings
code = run(GatewaySettings(**json.loads(sys.argv[1])))
print("torch" in sys.modules, "transformers" in sys.modules)
raise SystemExit(code)
"""
TIMEOUT_S = 40


@contextmanager
def process(**settings) -> Iterator[subprocess.Popen]:
    arguments = json.dumps(
        {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    )
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")},
        cwd=ROOT,
    )
    killer = threading.Timer(TIMEOUT_S, child.kill)
    killer.start()
    try:
        yield child
    finally:
        killer.cancel()
        child.kill()
        child.communicate()


def wait_ready(child: subprocess.Popen) -> None:
    assert child.stdout
    for line in child.stdout:
        if "] ready " in line:
            return
    raise AssertionError("the gateway ended before it was ready")


def test_it_says_ready_serves_drains_on_sigterm_and_needs_no_torch(
    fake: FakeTarget, tokenizer_dir: Path
) -> None:
    gate = threading.Semaphore(0)
    fake.script = lambda request: Script([[40], [41]], gate=gate)
    port = free_port()
    with process(port=port, target=fake.address, tokenizer=tokenizer_dir) as child:
        wait_ready(child)
        url = f"http://127.0.0.1:{port}"
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"prompt": "x", "max_tokens": 2, "stream": True},
            timeout=TIMEOUT_S,
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            child.send_signal(signal.SIGTERM)
            assert child.stdout
            assert any("draining" in line for line in child.stdout)
            gate.release()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        output, _ = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0, output
    # Neither torch nor transformers has been imported, although every part of the gateway was used.
    assert output.splitlines()[-1] == "False False"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "--api-key"),
        ({"target": "nowhere"}, "target: expected host:port"),
        ({"tokenizer": "/nonexistent"}, "outrider convert tokenizer"),
    ],
)
def test_what_it_cannot_start_with_is_told_with_the_fix(settings: dict, message: str) -> None:
    with process(port=0, **settings) as child:
        output, _ = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 1
    assert message in output
    assert "Traceback" not in output


def test_a_taken_port_is_told_with_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, process(port=taken.getsockname()[1]) as child:
        output, _ = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 1
    assert "--port" in output
    assert "Traceback" not in output


def test_a_goaway_frame_cannot_forge_log_lines(shared_fake: FakeTarget, tokenizer_dir: Path) -> None:
    """grpc's own log would print the frame's text as it is, before any authentication."""

    def frame(kind: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload

    forged = b'x"\nFORGED LINE\x1b[2J'
    grpc_port = free_port()
    with process(target=shared_fake.address, tokenizer=tokenizer_dir, grpc_port=grpc_port, port=0) as child:
        wait_ready(child)
        with socket.create_connection(("127.0.0.1", grpc_port), timeout=TIMEOUT_S) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, b""))
            connection.sendall(frame(7, bytes(8) + forged))
            # The server closes the connection once it has handled the frame.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        child.send_signal(signal.SIGTERM)
        output = child.communicate(timeout=TIMEOUT_S)[0]
    assert child.returncode == 0
    assert "FORGED" not in output
