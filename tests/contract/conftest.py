"""The gateway as clients meet it. Tests that take `stack` alone know nothing of what is behind it and hold for a real stack too."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_target import FakeTarget
from tokenizers import Tokenizer
from toy_text import make_tokenizer

from outrider.services.gateway.app import GatewayServer
from outrider.services.gateway.settings import GatewaySettings

START_S = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class Stack:
    """Where a gateway listens and what it serves."""

    base_url: str
    grpc_address: str
    model: str


class GatewayThread:
    """A gateway on an event loop of its own thread, so that synchronous clients can be used beside it."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("port", 0)
        settings.setdefault("grpc_port", free_port())
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.server = self.call(self._start(GatewaySettings(**settings)))
        except BaseException:
            self._end_loop()
            raise

    @staticmethod
    async def _start(settings: GatewaySettings) -> GatewayServer:
        server = GatewayServer(settings)
        await server.start()
        return server

    def submit(self, coroutine: Any) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Any) -> Any:
        return self.submit(coroutine).result(START_S)

    def wait_ready(self, ready: bool = True) -> None:
        self.call(self.server.core.client.readiness.wait_for(ready))

    @property
    def stack(self) -> Stack:
        return Stack(f"http://127.0.0.1:{self.server.port}", f"127.0.0.1:{self.server.grpc_port}", "toy")

    def close(self) -> None:
        self.call(self.server.drain())
        self._end_loop()

    def _end_loop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(START_S)
        self.loop.close()


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def shared_fake(tokenizer: Tokenizer) -> Iterator[FakeTarget]:
    target = FakeTarget(tokenizer.get_vocab_size())
    target.address = target.start()
    yield target
    target.stop()


@pytest.fixture(scope="module")
def shared_gateway(shared_fake: FakeTarget, tokenizer_dir: Path) -> Iterator[GatewayThread]:
    gateway = GatewayThread(target=shared_fake.address, tokenizer=tokenizer_dir)
    gateway.wait_ready()
    yield gateway
    gateway.close()


@pytest.fixture
def fake(shared_fake: FakeTarget) -> Iterator[FakeTarget]:
    """The target behind `gateway`, to be scripted; back to its default afterwards."""
    shared_fake.seen.clear()
    for events in (shared_fake.cancels, shared_fake.pauses, shared_fake.resumes):
        events.queue.clear()
    yield shared_fake
    shared_fake.script = shared_fake.default_script


@pytest.fixture
def gateway(shared_gateway: GatewayThread) -> GatewayThread:
    return shared_gateway


@pytest.fixture
def stack(shared_gateway: GatewayThread) -> Stack:
    return shared_gateway.stack


@pytest.fixture
def make_gateway(shared_fake: FakeTarget, tokenizer_dir: Path) -> Iterator[Callable[..., GatewayThread]]:
    """Starts further gateways with other settings; closes them in the end."""
    started: list[GatewayThread] = []

    def make(*, ready: bool = True, **settings: Any) -> GatewayThread:
        settings.setdefault("target", shared_fake.address)
        settings.setdefault("tokenizer", tokenizer_dir)
        gateway = GatewayThread(**settings)
        started.append(gateway)
        if ready:
            gateway.wait_ready()
        return gateway

    yield make
    for gateway in started:
        gateway.close()
