"""Connections without requests: closed after a time, and never in the way of clients with requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import queue
import resource
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import MakeGateway, client_of
from support.connection.throwaway_ca import ThrowawayCa

from outrider.services.gateway.guards.open_files import (
    connection_cap,
    limit_accept_errors,
    raise_file_limit,
)
from outrider.shared.rpc.options import OPEN_FILES_SHARE

WAIT_S = 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of an HTTP/2 connection, with empty settings."""
SETTINGS_CONFIRMED = bytes([0, 0, 0, 4, 1, 0, 0, 0, 0])
HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def _closed(connection: socket.socket) -> bool:
    """Wait until the server closes the connection. A timeout raises."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost", HEAD + b"GET /health HTT"])
def test_a_connection_without_a_complete_head_is_closed(make_gateway: MakeGateway, sent: bytes) -> None:
    gateway = make_gateway(head_timeout_s=0.2)
    with _connect(gateway.server.port) as connection:
        connection.sendall(sent)
        assert _closed(connection)


def test_a_running_request_outlives_the_head_timeout(make_gateway: MakeGateway) -> None:
    """A body that is not complete keeps the request running. Only its own limit may end it."""
    gateway = make_gateway(head_timeout_s=0.05)
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    start += b"Content-Type: application/json\r\nContent-Length: 15\r\n\r\n"
    with _connect(gateway.server.port) as connection, _connect(gateway.server.port) as silent:
        connection.sendall(start)
        assert _closed(silent)
        connection.sendall(b'{"prompt": "x"}')
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_silent_connections_make_room_for_requests(
    make_gateway: MakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = make_gateway(max_connections=16, head_timeout_s=300)
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(_connect(gateway.server.port)) for _ in range(64)]
        assert all(map(_closed, connections[:48]))
        with client_of(gateway) as client:
            assert client.get("/health").status_code == 200
    assert capsys.readouterr().out.count("too many connections") == 1


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
def test_a_connection_without_a_tls_handshake_is_closed(
    make_gateway: MakeGateway, tmp_path: Path, sent: bytes
) -> None:
    """asyncio would wait for the handshake for 60 s."""
    front = ThrowawayCa(tmp_path).issue("front")
    gateway = make_gateway(tls_cert=front.cert, tls_key=front.key, head_timeout_s=0.2)
    with _connect(gateway.server.port) as connection:
        connection.sendall(sent)
        assert _closed(connection)


def test_connections_without_a_tls_handshake_make_room_for_requests(
    make_gateway: MakeGateway, tmp_path: Path
) -> None:
    ca = ThrowawayCa(tmp_path)
    front = ca.issue("front")
    gateway = make_gateway(tls_cert=front.cert, tls_key=front.key, max_connections=16, head_timeout_s=300)
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(_connect(gateway.server.port)) for _ in range(64)]
        assert all(map(_closed, connections[:48]))
        client = http.client.HTTPSConnection(
            "127.0.0.1",
            gateway.server.port,
            timeout=WAIT_S,
            context=ssl.create_default_context(cafile=ca.cert),
        )
        with contextlib.closing(client):
            client.request("GET", "/health")
            assert client.getresponse().status == 200


def test_silent_connections_to_the_grpc_port_leave_the_rest_alone(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.shared.rpc.options.connection_limit", lambda: 8)
    gateway = make_gateway()
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(_connect(gateway.server.grpc_port)) for _ in range(64)]
        assert all(map(_closed, connections[8:]))
        with client_of(gateway) as client:
            assert client.get("/health").status_code == 200
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True
        )
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_grpc_connection_that_does_not_confirm_the_settings_is_closed(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC alone would wait for 60 s."""
    monkeypatch.setattr("outrider.shared.rpc.options.HANDSHAKE_TIMEOUT_MS", 500)
    gateway = make_gateway()
    with _connect(gateway.server.grpc_port) as connection:
        connection.sendall(PREFACE)
        assert _closed(connection)


def test_a_grpc_connection_without_calls_is_closed_and_may_come_back(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.services.gateway.app.GRPC_IDLE_S", 0.5)
    gateway = make_gateway()
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        states: queue.Queue[grpc.ChannelConnectivity] = queue.Queue()
        channel.subscribe(states.put)
        for _ in range(2):
            reply = health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            while states.get(timeout=WAIT_S) is not grpc.ChannelConnectivity.READY:
                pass
            assert states.get(timeout=WAIT_S) is grpc.ChannelConnectivity.IDLE
    with _connect(gateway.server.grpc_port) as connection:
        connection.sendall(PREFACE + SETTINGS_CONFIRMED)
        assert _closed(connection)


def test_a_process_without_free_descriptors_logs_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        limit_accept_errors(loop)
        error = OSError(errno.EMFILE, "Too many open files")
        for _ in range(1000):
            loop.call_exception_handler(
                {"message": "socket.accept() out of system resource", "exception": error}
            )
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_limit_leaves_file_descriptors_for_the_rest() -> None:
    assert 0 < connection_cap(0, 1024) <= 1024 - 256 - 1024 // OPEN_FILES_SHARE
    assert connection_cap(100, 1024) == 100
    assert connection_cap(5000, 1024) == connection_cap(0, 1024)
    assert connection_cap(0, 64) > 0


def test_the_soft_limit_of_open_files_is_raised() -> None:
    """The limit belongs to the process, so another process tries it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    script = (
        "import resource\n"
        "from outrider.services.gateway.guards.open_files import raise_file_limit\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    said, real = map(int, out.split())
    assert said == real > 256
    assert raise_file_limit() > 0


def test_a_request_of_ambiguous_length_is_refused_and_the_connection_closed(
    make_gateway: MakeGateway,
) -> None:
    """Behind a proxy that reads the other length, what follows would be a request of another client."""
    gateway = make_gateway()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEAD
    with _connect(gateway.server.port) as connection:
        connection.sendall(request)
        reply = bytearray()
        while part := connection.recv(4096):
            reply += part
    assert reply.startswith(b"HTTP/1.1 400")
    assert reply.count(b"HTTP/1.1") == 1
