"""The gateway as a process: imports, start-up, start-up errors and shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
from fake_target import FakeTarget, Script
from gateway_thread import free_port
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.gateway.guards.open_files import raise_file_limit

ROOT = Path(__file__).parents[2]
RUN = """
import json, resource, sys
if open_files := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
from outrider.services.gateway.app import run
from outrider.services.gateway.settings import GatewaySettings
code = run(GatewaySettings(**json.loads(sys.argv[1])))
print("torch" in sys.modules, "transformers" in sys.modules)
raise SystemExit(code)
"""
TIMEOUT_S = 40
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of an HTTP/2 connection, with empty settings. The server's settings are not confirmed."""
REFUSED_S, SERVED_AGAIN_S = 5, 20
"""Longest time until a new client is refused, and until it is served. gRPC's own time limit is 60 s."""


@contextmanager
def process(open_files: int = 0, **settings) -> Iterator[subprocess.Popen]:
    """Run a gateway. `open_files` is its limit of open files; 0 keeps this process's own limit."""
    arguments = json.dumps(
        {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    )
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, arguments, str(open_files)],
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


def test_1100_silent_grpc_connections_at_1024_open_files(fake: FakeTarget, tokenizer_dir: Path) -> None:
    """Streams continue. A new client is refused at once, and served after the connections' time limit."""
    raise_file_limit()
    gate = threading.Semaphore(0)
    fake.script = lambda request: Script([[40 + index] for index in range(3)], gate=gate)
    ports = {"port": free_port(), "grpc_port": free_port()}
    address = ("127.0.0.1", ports["grpc_port"])
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    request = gateway_pb2.CompleteRequest(text="x", options=gateway_pb2.GenerationOptions(max_tokens=3))
    with ExitStack() as held:
        settings = {"target": fake.address, "tokenizer": tokenizer_dir, **ports}
        wait_ready(held.enter_context(process(open_files=1024, **settings)))
        first, second = (
            held.enter_context(grpc.insecure_channel(f"127.0.0.1:{address[1]}", own_connection))
            for _ in range(2)
        )
        stream = gateway_pb2_grpc.InferenceStub(first).Complete(request, timeout=TIMEOUT_S)
        tokens = list(next(stream).chunk.token_ids)
        for _ in range(1100):
            connection = held.enter_context(socket.create_connection(address, timeout=TIMEOUT_S))
            with suppress(ConnectionError):  # the gateway may have closed it
                connection.sendall(PREFACE)
        check = health_pb2_grpc.HealthStub(second).Check
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as refused:
            check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < REFUSED_S
        assert httpx.get(f"http://127.0.0.1:{ports['port']}/health", timeout=TIMEOUT_S).status_code == 200
        gate.release(2)
        tokens += [token for reply in stream for token in reply.chunk.token_ids]
        assert tokens == [40, 41, 42]
        check(health_pb2.HealthCheckRequest(), timeout=SERVED_AGAIN_S, wait_for_ready=True)
