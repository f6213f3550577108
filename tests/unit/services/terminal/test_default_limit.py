"""`outrider generate` without --max-tokens: the default shrinks to what the model's context leaves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.services.scripted_gateway import ScriptedGateway, scripted_gateway
from typer.testing import CliRunner

from outrider.services.cli.commands import app
from outrider.shared.base.errors import OutriderError

CONTEXT = 100


@pytest.fixture
def served() -> Iterator[tuple[ScriptedGateway, str]]:
    with scripted_gateway() as (script, address):
        script.context = CONTEXT
        yield script, address


def generate(address: str, *arguments: str) -> None:
    CliRunner().invoke(app, ["generate", "--url", address, *arguments], catch_exceptions=False)


@pytest.mark.parametrize("arguments", [(), ("--raw",), ("--json",)])
def test_the_default_shrinks_to_what_fits(
    served: tuple[ScriptedGateway, str], arguments: tuple[str, ...]
) -> None:
    script, address = served
    generate(address, "hello", *arguments)
    assert script.refused == 1
    assert [body["max_tokens"] for body in script.bodies] == [CONTEXT - len("hello")]
    script.context = 1000
    generate(address, "hello", *arguments)
    assert (script.refused, script.bodies[1]["max_tokens"]) == (1, 256)


def test_a_limit_of_the_user_is_kept_and_refused(served: tuple[ScriptedGateway, str]) -> None:
    script, address = served
    with pytest.raises(OutriderError, match="does not fit"):
        generate(address, "hello", "--max-tokens", "256")
    assert script.bodies == []


def test_a_prompt_without_room_for_an_answer_is_refused(served: tuple[ScriptedGateway, str]) -> None:
    script, address = served
    with pytest.raises(OutriderError, match="does not fit"):
        generate(address, "x" * CONTEXT)
    assert script.bodies == []
