"""Fixtures for tests of the gateway from a client's view.

Tests that use `stack` alone make no assumptions about the target, so they also run against a real stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread, Stack
from support.models.toy_text import make_tokenizer
from tokenizers import Tokenizer
from tool_chat import make_tool_tokenizer


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


@pytest.fixture(scope="module")
def tool_gateway(
    shared_fake: FakeTarget, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayThread]:
    folder = make_tool_tokenizer(tmp_path_factory.mktemp("tools"))
    gateway = GatewayThread(target=shared_fake.address, tokenizer=folder)
    gateway.wait_ready()
    yield gateway
    gateway.close()


@pytest.fixture
def fake(shared_fake: FakeTarget) -> Iterator[FakeTarget]:
    """The target behind `gateway`, for tests that script it. Afterwards its default script is restored."""
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
    """Return a function that starts another gateway with other settings. All are closed after the test."""
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


@pytest.fixture
def make_target(tokenizer: Tokenizer) -> Iterator[Callable[..., FakeTarget]]:
    """Return a function that starts a target. All are stopped after the test."""
    started: list[FakeTarget] = []

    def make(**options: Any) -> FakeTarget:
        target = FakeTarget(tokenizer.get_vocab_size(), **options)
        target.start()
        started.append(target)
        return target

    yield make
    for target in started:
        target.stop()
