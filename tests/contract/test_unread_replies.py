"""Replies that the client does not read: closed after a time, and never in the way of other clients."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_target import FakeTarget
from http_calls import MakeGateway, client_of
from support.connection.throwaway_ca import ThrowawayCa
from test_streams import FLOOD, flood, open_stream

from outrider.services.gateway.guards.connections import GuardedProtocol

WAIT_S = 20
PIPELINED = 200
HEAD = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


def _connect(port: int) -> socket.socket:
    """Connect with a receive buffer that is smaller than the replies."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT_S)
    connection.connect(("127.0.0.1", port))
    return connection


def _after(monkeypatch: pytest.MonkeyPatch, name: str) -> threading.Event:
    """Return an event that is set after the next call of a method of the REST connections."""
    called, method = threading.Event(), getattr(GuardedProtocol, name)

    def call(self: GuardedProtocol, *arguments: Any) -> Any:
        result = method(self, *arguments)
        called.set()
        return result

    monkeypatch.setattr(GuardedProtocol, name, call)
    return called


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_connection_that_reads_none_of_its_replies_is_closed(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encrypted: bool
) -> None:
    lost = _after(monkeypatch, "connection_lost")
    ca = ThrowawayCa(tmp_path)
    front = ca.issue("front")
    gateway = make_gateway(
        unread_timeout_s=0.3, **({"tls_cert": front.cert, "tls_key": front.key} if encrypted else {})
    )
    with contextlib.ExitStack() as held:
        connection = held.enter_context(_connect(gateway.server.port))
        if encrypted:
            context = ssl.create_default_context(cafile=ca.cert)
            connection = held.enter_context(context.wrap_socket(connection, server_hostname="127.0.0.1"))
        connection.sendall(PIPELINED * HEAD)
        assert lost.wait(WAIT_S)


def test_connections_that_read_nothing_make_room_for_requests(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.services.gateway.guards.connections.UNREAD_CHECK_S", 0.05)
    gateway = make_gateway(max_connections=16, unread_timeout_s=300)
    with contextlib.ExitStack() as held:
        for _ in range(16):
            held.enter_context(_connect(gateway.server.port)).sendall(PIPELINED * HEAD)
        until, status = time.monotonic() + WAIT_S, 0
        # The gateway refuses connections until it has seen that the others read nothing.
        while status != 200 and time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError), client_of(gateway) as client:
                status = client.get("/health").status_code
        assert status == 200


def test_the_wait_for_the_next_head_does_not_cut_a_reply_off(make_gateway: MakeGateway) -> None:
    """The client reads the replies after the time limit of the next head.

    Three replies exceed the kernel's buffers, but the gateway's buffer is not full before the third.
    """
    gateway = make_gateway(head_timeout_s=0.2)
    with client_of(gateway) as client:
        whole = client.get("/openapi.json").content
    with _connect(gateway.server.port) as connection:
        connection.sendall(3 * HEAD)
        for _ in range(2):
            # A silent connection lasts as long as the time limit.
            with _connect(gateway.server.port) as silent:
                assert not silent.recv(1)
        received = bytearray()
        while received.count(whole) < 3:
            part = connection.recv(65536)
            assert part, "the reply is cut off"
            received += part


def test_the_connection_of_an_unread_stream_is_closed_after_its_sequence(
    make_gateway: MakeGateway, make_target: Callable[..., FakeTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = _after(monkeypatch, "connection_lost")
    flooding = make_target(max_model_len=1_000_000, trace_nodes=100)
    flooding.script = flood
    gateway = make_gateway(
        target=flooding.address, slow_reader_bytes=16 * 1024, slow_reader_timeout_s=0.3, unread_timeout_s=0.3
    )
    with open_stream(gateway, FLOOD, receive_buffer=4096):
        assert flooding.cancels.get(timeout=WAIT_S)
        assert lost.wait(WAIT_S)
