"""Fixtures for clients of other projects: the embedded pair, and a scripted target that calls tools.

`make test-clients` installs the clients and runs these tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from support.services.stack import Stack, supervised
from tokenizers import Tokenizer
from tool_chat import make_tool_tokenizer

# The clients must not ask other hosts for price lists, tokenizers or data sets, or send statistics to them.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
}


@pytest.fixture(scope="session")
def stacks() -> Iterator[tuple[Stack, Stack]]:
    """The embedded pair, and the same target without a draft. They start at the same time."""
    with ExitStack() as running:
        starts = (
            lambda: supervised(),
            lambda: supervised("--draft", "none", "--speculative-algorithm", "none", until=lambda _: None),
        )
        with ThreadPoolExecutor() as threads:
            speculating, plain = threads.map(lambda start: running.enter_context(start()), starts)
        yield speculating, plain


@pytest.fixture
def stack(stacks: tuple[Stack, Stack]) -> Stack:
    return stacks[0]


@pytest.fixture(scope="session")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_tokenizer(tmp_path_factory.mktemp("tools"))


@pytest.fixture(scope="session")
def tokenizer(tool_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tool_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def fake(tokenizer: Tokenizer) -> Iterator[FakeTarget]:
    """A target that answers with scripted tool calls."""
    target = FakeTarget(tokenizer.get_vocab_size(), max_model_len=2048)
    target.address = target.start()
    yield target
    target.stop()


@pytest.fixture(scope="session")
def tool_gateway(fake: FakeTarget, tool_folder: Path) -> Iterator[GatewayThread]:
    gateway = GatewayThread(target=fake.address, tokenizer=tool_folder)
    gateway.wait_ready()
    yield gateway
    gateway.close()
