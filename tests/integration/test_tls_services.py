"""Gateway, target and draft as processes that connect over TCP by mutual TLS with a token."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.connection.throwaway_ca import Certificate, ThrowawayCa
from support.services.stack import DEMO_HEAD, DEMO_TARGET, START_TIMEOUT_S, Process

from outrider.services.stack.launch import free_port

TOKEN = "0123456789abcdef-the-token"
BODY = {"prompt": [9, 9], "max_tokens": 24, "ignore_eos": True, "temperature": 0, "stream": True}
WAIT_S = 30.0


class SecureServices:
    """The three services, and the files with which they trust each other."""

    def __init__(self, folder: Path, cleanup: contextlib.ExitStack) -> None:
        self._folder = folder
        self._cleanup = cleanup
        self.ca = ThrowawayCa(folder / "ca")
        self.client = self.ca.issue("client")
        self.token = self.write_token("token", TOKEN)
        self.target_address = f"127.0.0.1:{free_port()}"
        draft_address = f"127.0.0.1:{free_port()}"
        cpu = ("--device", "cpu", "--threads", "1")
        weights = ("--draft", str(DEMO_HEAD), "--target-weights", str(DEMO_TARGET))
        self.draft = self.start("draft", "--listen", draft_address, *weights, "--device", "cpu")
        self.target = self.start(
            "target",
            *("--listen", self.target_address, "--model", str(DEMO_TARGET), *cpu),
            *("--draft", f"grpc://{draft_address}"),
        )
        self.front = self.ca.issue("front")
        self.url = self.start_gateway()[0]

    def write_token(self, name: str, text: str) -> Path:
        file = self._folder / name
        file.touch(0o600)
        file.write_text(text)
        return file

    def start(self, service: str, *flags: str, **files: Path | None) -> Process:
        """Start a service. `files` replace its own files; None leaves one out."""
        own = self.ca.issue(f"{service}-{len(list(self._folder.glob('*.log')))}")
        given = {"cert": own.cert, "key": own.key, "ca": self.ca.cert, "token": self.token, **files}
        names = {"cert": "tls-cert", "key": "tls-key", "ca": "tls-ca", "token": "token-file"}
        security = [
            part
            for name, file in given.items()
            if file is not None
            for part in (f"--peer-{names[name]}", str(file))
        ]
        log = self._folder / f"{len(list(self._folder.glob('*.log')))}-{service}.log"
        process = Process("serve", service, *flags, *security, log=log)
        self._cleanup.callback(process.stop)
        return process

    def start_gateway(self, **files: Path | None) -> tuple[str, Process]:
        """Start a gateway that accepts only clients with certificates. Return its address."""
        port = free_port()
        front = (
            *("--tls-cert", str(self.front.cert), "--tls-key", str(self.front.key)),
            *("--tls-ca", str(self.ca.cert)),
        )
        own = ("--target", self.target_address, "--tokenizer", str(DEMO_TARGET), "--port", str(port))
        return f"https://127.0.0.1:{port}", self.start("gateway", *own, *front, **files)

    def http(self, url: str, client: Certificate | None) -> httpx.Client:
        context = ssl.create_default_context(cafile=self.ca.cert)
        if client is not None:
            context.load_cert_chain(client.cert, client.key)
        return httpx.Client(base_url=url, verify=context, timeout=WAIT_S, trust_env=False)

    def wait(self, url: str, status: int, part: str = "") -> None:
        """Wait until ``/ready`` answers with a status and a text."""
        stop = threading.Event()
        timer = threading.Timer(START_TIMEOUT_S, stop.set)
        timer.start()
        found = (0, "")
        with self.http(url, self.client) as http:
            while found[0] != status or part not in found[1]:
                assert not stop.is_set(), found
                with contextlib.suppress(httpx.TransportError):
                    reply = http.get("/ready")
                    found = (reply.status_code, reply.text)
                stop.wait(0.05)
        timer.cancel()


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureServices]:
    with contextlib.ExitStack() as cleanup:
        running = SecureServices(tmp_path_factory.mktemp("services"), cleanup)
        running.wait(running.url, 200)
        yield running


def _lines(process: Process) -> Iterator[str]:
    """Yield the lines of a process's log, and wait for more while it runs."""
    seen, pause = 0, threading.Event()
    ends = time.monotonic() + WAIT_S
    while time.monotonic() < ends:
        lines = process.output.splitlines()
        yield from lines[seen:]
        seen = len(lines)
        pause.wait(0.02)


def streamed(http: httpx.Client, mode: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a stream, and the statistics of its speculation."""
    text, speculation = "", {}
    with http.stream("POST", "/v1/completions", json={**BODY, "speculation": {"mode": mode}}) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event
                for choice in event["choices"]:
                    text += choice["text"]
                    speculation |= choice.get("speculation") or {}
                speculation |= event.get("speculation") or {}
    return text, speculation


def test_a_stream_is_drafted_and_the_secrets_are_in_no_log(services: SecureServices) -> None:
    with services.http(services.url, services.client) as http:
        plain, _ = streamed(http, "off")
        stop = threading.Event()
        timer = threading.Timer(START_TIMEOUT_S, stop.set)
        timer.start()
        text, speculation = streamed(http, "on")
        while not speculation.get("draft_tokens"):
            assert not stop.is_set()
            text, speculation = streamed(http, "on")
        timer.cancel()
    assert text == plain != ""
    assert not any(TOKEN in process.output for process in (services.draft, services.target))


def test_clients_without_a_certificate_are_refused(services: SecureServices) -> None:
    with services.http(services.url, None) as http, pytest.raises(httpx.TransportError):
        http.get("/health")


def test_a_gateway_with_another_authority_or_token_says_why_it_is_not_ready(
    services: SecureServices, tmp_path: Path
) -> None:
    stranger = ThrowawayCa(tmp_path / "stranger").issue("stranger")
    wrong = {
        "certificate": services.start_gateway(cert=stranger.cert, key=stranger.key),
        "authority": services.start_gateway(ca=ThrowawayCa(tmp_path / "other").cert),
        "token": services.start_gateway(token=services.write_token("wrong", TOKEN[::-1])),
        "no token": services.start_gateway(token=None),
    }
    said = {"certificate": "handshake", "authority": "handshake", "token": "token", "no token": "token"}
    for name, (url, process) in wrong.items():
        services.wait(url, 503)
        with services.http(url, services.client) as http:
            assert http.post("/v1/completions", json={**BODY, "stream": False}).status_code == 503
        line = next(found for found in _lines(process) if "target cannot be used" in found)
        assert said[name] in line
        assert TOKEN not in process.output
        process.stop()
    services.wait(services.url, 200)
