"""Bytes that are not a valid HTTP request, and requests that a client sends ahead of the replies."""

from __future__ import annotations

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.client import HTTPResponse

import pytest
from gateway_thread import GatewayThread
from http_calls import MakeGateway, client_of

WAIT_S = 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
SMALL = HEAD + b'Content-Length: 34\r\n\r\n{"prompt": "x", "max_tokens": 16 }'
AHEAD_BYTES = 24 << 20
"""More bytes than the buffers of both kernels hold, and than a connection may have unparsed."""

MALFORMED = {
    "two lengths": (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}", 400),
    "a negative length": (HEAD + b"Content-Length: -5\r\n\r\n{}", 400),
    "an unknown encoding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n{}", 501),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "no version": (b"GET /health\r\n\r\n", 400),
    "a space in the path": (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a space in a name": (b"GET /health HTTP/1.1\r\nHost: x\r\na b: c\r\n\r\n", 400),
    "a head that is too long": (b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 70_000, 431),
    "TLS on a plain port": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), 400),
    "a chunk without a size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
}


def _connect(gateway: GatewayThread) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.server.port), timeout=WAIT_S)


@pytest.mark.parametrize(("sent", "status"), MALFORMED.values(), ids=MALFORMED)
def test_a_request_that_is_not_http_gets_an_error_in_json(
    gateway: GatewayThread, sent: bytes, status: int
) -> None:
    with _connect(gateway) as connection:
        connection.sendall(sent)
        with HTTPResponse(connection) as reply:
            reply.begin()
            error = json.loads(reply.read())["error"]
            assert (reply.status, reply.getheader("Content-Type")) == (status, "application/json")
            assert reply.reason == HTTPStatus(status).phrase
            assert reply.getheader("X-Request-Id")
            assert reply.will_close
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] == "malformed_request"
        assert connection.recv(1) == b""


def test_a_malformed_request_is_counted_and_logged(
    make_gateway: MakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = make_gateway()
    with _connect(gateway) as connection:
        connection.sendall(MALFORMED["two lengths"][0])
        while connection.recv(4096):
            pass
    with client_of(gateway) as client:
        metrics = client.get("/metrics").text
    assert 'outrider_http_requests_total{route="other",status="400"} 1.0' in metrics
    assert 'outrider_request_failures_total{model="",reason="malformed_request"} 1.0' in metrics
    assert "malformed request" in capsys.readouterr().out


@pytest.mark.parametrize("line", [b"Authorization : Bearer sk-secret", b"Authorization: Bearer sk-secret\0"])
def test_a_malformed_line_with_a_key_is_quoted_nowhere(
    make_gateway: MakeGateway, capsys: pytest.CaptureFixture[str], line: bytes
) -> None:
    gateway = make_gateway()
    with _connect(gateway) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n")
        reply = bytearray()
        while part := connection.recv(4096):
            reply += part
    assert reply.startswith(b"HTTP/1.1 400 Bad Request")
    assert b"secret" not in reply
    printed = capsys.readouterr()
    assert "malformed request" in printed.out
    assert "secret" not in printed.out + printed.err


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nope"])
def test_a_malformed_body_ends_its_request_without_a_traceback(
    make_gateway: MakeGateway, capsys: pytest.CaptureFixture[str], path: bytes
) -> None:
    """Even if the route refuses the request at the same moment."""
    gateway = make_gateway()
    start = HEAD.replace(b"/v1/completions", path).replace(b"application/json", b"text/plain")
    with _connect(gateway) as connection:
        connection.sendall(start + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n")
        reply = bytearray()
        while part := connection.recv(4096):
            reply += part
    assert reply.count(b"HTTP/1.1") == 1
    with client_of(gateway) as client:
        assert client.get("/health").status_code == 200
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err


def test_a_request_for_a_websocket_is_answered_over_http(
    make_gateway: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn would hand the connection to another protocol, if a package for WebSockets is installed."""
    monkeypatch.setattr("uvicorn.protocols.websockets.auto.AutoWebSocketsProtocol", object)
    gateway = make_gateway()
    with client_of(gateway) as client:
        headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert client.get("/health", headers=headers).status_code == 200


def test_requests_sent_ahead_wait_in_the_kernel(make_gateway: MakeGateway) -> None:
    """The gateway would otherwise read up to 256 KiB of further requests for each one that it answers."""
    gateway = make_gateway(max_connections=16)
    replies = 0
    with _connect(gateway) as connection, ThreadPoolExecutor(1) as pool:
        connection.setblocking(False)

        def flood() -> int:
            sent, block = 0, SMALL * 500
            ends = time.monotonic() + WAIT_S
            while sent < AHEAD_BYTES and replies < 200 and time.monotonic() < ends:
                try:
                    sent += connection.send(block[sent % len(SMALL) :])
                except BlockingIOError:
                    time.sleep(0.001)
            return sent

        flooding = pool.submit(flood)
        text, ends = bytearray(), time.monotonic() + WAIT_S
        while replies < 200 and not flooding.done() and time.monotonic() < ends:
            try:
                text += connection.recv(1 << 16)
            except BlockingIOError:
                time.sleep(0.001)
            replies = len(re.findall(rb"HTTP/1.1 200", text))
        assert flooding.result() < AHEAD_BYTES
    assert replies >= 200
