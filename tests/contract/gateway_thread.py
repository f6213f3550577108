"""A gateway for tests that runs on its own thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from outrider.services.gateway.app import GatewayServer
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.stack.launch import free_port

START_S = 20


@dataclass(slots=True)
class Stack:
    """The addresses of a gateway and the model that it serves."""

    base_url: str
    grpc_address: str
    model: str


class GatewayThread:
    """A gateway on an event loop in its own thread, so that tests can use synchronous clients."""

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
        self.call(self.server.core.targets.readiness.wait_for(ready))

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
