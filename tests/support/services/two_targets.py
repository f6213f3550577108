"""Two targets behind one gateway as real processes, and a crowd of streams with known answers."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from outrider.common.v1 import common_pb2
from outrider.services.stack.launch import free_port
from support.services.gateway_client import Client
from support.services.stack import DEMO_HEAD, DEMO_TARGET, PROMPTS, START_TIMEOUT_S, Process

STREAMS = 32
NEW_TOKENS = 80
MODES = (
    common_pb2.SPECULATION_MODE_ON,
    common_pb2.SPECULATION_MODE_AUTO,
    common_pb2.SPECULATION_MODE_OFF,
)


class TwoTargets:
    """Two targets with drafts in their processes, and a gateway.

    Args:
        cleanup: Stops all processes when it is closed.
        flags: Further flags of each target.
    """

    def __init__(self, cleanup: contextlib.ExitStack, *flags: Sequence[str]) -> None:
        self._cleanup = cleanup
        self._flags = flags
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-"))
        self._addresses = [f"unix:{self._folder}/{name}.sock" for name in "ab"]
        self.targets = [self.start_target(index, wait=False) for index in (0, 1)]
        for process, address in zip(self.targets, self._addresses, strict=True):
            process.wait_serving(address)
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        gateway = self._start(
            "gateway",
            *("--port", str(port), "--grpc-port", str(port + 1), "--target", ",".join(self._addresses)),
            *("--tokenizer", str(DEMO_TARGET)),
        )
        gateway.wait_serving(f"127.0.0.1:{port + 1}")
        self.client = Client(f"127.0.0.1:{port + 1}")
        cleanup.callback(self.client.channel.close)
        self.wait_ready(2)

    def start_target(self, index: int, *, wait: bool = True) -> Process:
        address = self._addresses[index]
        process = self._start(
            "target",
            *("--listen", address, "--model", str(DEMO_TARGET), "--draft", f"inproc:{DEMO_HEAD}"),
            *("--drain-grace-s", "0.02", *self._flags[index]),
        )
        if wait:
            process.wait_serving(address)
        return process

    def _start(self, service: str, *arguments: str) -> Process:
        log = self._folder / f"{service}-{len(list(self._folder.glob('*.log')))}.log"
        process = Process("serve", service, *arguments, log=log)
        self._cleanup.callback(process.stop)
        return process

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/status.json", timeout=30) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def moves(self) -> float:
        samples = self.status()["metrics"].items()
        return sum(value for name, value in samples if "moved_sequences" in name)

    def wait_ready(self, count: int) -> None:
        """Wait until `count` targets are ready for the gateway. The status asks the targets, so it waits."""
        stop = threading.Event()
        timer = threading.Timer(START_TIMEOUT_S, stop.set)
        timer.start()
        while sum(one["ready"] for one in self.status()["targets"]) != count:
            assert not stop.is_set(), self.status()["targets"]
            stop.wait(0.05)
        timer.cancel()

    def answer(self, index: int, on_tokens: Callable[[int], None] = lambda count: None) -> list[int]:
        """Return the tokens of stream `index`. The streams differ in prompt, sampling and mode."""
        result = self.client.chat(
            PROMPTS[index % len(PROMPTS)],
            mode=MODES[index % len(MODES)],
            max_tokens=NEW_TOKENS,
            temperature=0.0 if index % 2 else 0.8,
            seed=index,
            on_tokens=on_tokens,
        )
        assert result.finished is not None
        assert result.finished.usage.completion_tokens == NEW_TOKENS
        return result.token_ids

    def answers(self) -> list[list[int]]:
        """Return the tokens of all streams of an undisturbed run."""
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.answer, range(STREAMS)))


class Crowd:
    """All streams at once. `all_run` is set when each one has had tokens."""

    def __init__(self, two: TwoTargets, pool: ThreadPoolExecutor) -> None:
        self.all_run = threading.Event()
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self.answers = [pool.submit(two.answer, index, self._note(index)) for index in range(STREAMS)]

    def _note(self, index: int) -> Callable[[int], None]:
        def note(count: int) -> None:
            with self._lock:
                self._running.add(index)
                if len(self._running) == STREAMS:
                    self.all_run.set()

        return note

    def results(self) -> list[list[int]]:
        return [one.result(120) for one in self.answers]
