"""The address and the key with which the `outrider bench` commands reach a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.services.fake_openai import FakeServer
from typer.testing import CliRunner

from outrider.bench.load import shared_prefix
from outrider.services.cli.commands import app

COMMANDS = {
    "serve": ("--prompt-tokens", "4", "--max-tokens", "1", "--duration", "0.2", "--request-rate", "20"),
    "mixed": ("--api", "openai", "--only", "ttft", "--pairs", "1", "--ttft", "16"),
    "prefix": (),
}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    one = FakeServer("outrider")
    yield one
    one.close()


class MeasuredError(Exception):
    """Ends `bench prefix` where it would begin to measure."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that `bench prefix` measures."""
    addresses: list[str] = []

    async def measure(_options: Any, url: str) -> None:
        addresses.append(url)
        raise MeasuredError

    monkeypatch.setattr(shared_prefix, "_measure", measure)
    return addresses


@pytest.mark.parametrize("ending", ["", "/v1", "/v1/"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_address_may_lack_its_scheme_and_may_end_with_v1(
    server: FakeServer, measured: list[str], tmp_path: Path, command: str, ending: str
) -> None:
    address = server.url.removeprefix("http://") + ending
    flags = ("--url", address, "--output", str(tmp_path))
    result = CliRunner().invoke(app, ["bench", command, *flags, *COMMANDS[command]])
    if command == "prefix":
        assert isinstance(result.exception, MeasuredError)
        assert measured == [server.url]
    else:
        assert result.exit_code == 0, result.output
        assert server.bodies


@pytest.mark.parametrize("command", COMMANDS)
def test_the_key_of_the_environment_is_sent(
    server: FakeServer, measured: list[str], tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEY", "hush")
    flags = ("--url", server.url, "--output", str(tmp_path))
    CliRunner().invoke(app, ["bench", command, *flags, *COMMANDS[command]])
    assert server.keys == {"Bearer hush"}
