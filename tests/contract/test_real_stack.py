"""Runs the client tests against the three real services, as processes that serve the embedded pair."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from gateway_thread import Stack
from sampling_calls import *  # noqa: F403
from state_calls import *  # noqa: F403
from structured_calls import *  # noqa: F403
from test_generate_route import *  # noqa: F403 - imports the tests themselves
from test_grpc_client import *  # noqa: F403
from test_openai_client import *  # noqa: F403
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.stack.launch import free_port, running_stack
from outrider.services.stack.options import StackOptions


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    port = free_port()
    lines: list[str] = []

    def echo(service: str, line: str) -> None:
        lines.append(f"{service} | {line}")

    with running_stack(StackOptions(port=port, device="cpu"), echo, lines.append) as started:
        yield Stack(started.url, f"127.0.0.1:{port + 1}", "target")


@pytest.fixture
def stack(running: Stack) -> Stack:
    return running


@pytest.mark.parametrize("flags", [(), ("--raw",)])
def test_the_json_of_generate_has_every_token_id(running: Stack, flags: tuple[str, ...]) -> None:
    command = [
        "generate",
        "List 3 countries.",
        "--json",
        "--max-tokens",
        "12",
        "--url",
        running.base_url,
        *flags,
    ]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    reply = json.loads(result.stdout)
    assert len(reply["token_ids"]) == reply["completion_tokens"] > 0
