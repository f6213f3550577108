"""The target and the draft that `outrider doctor`, `verify` and `tune` use if flags are left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.doctor import command as doctor_command
from outrider.services.hub.pair import DEMO_DRAFT, DEMO_TARGET
from outrider.services.tune import command as tune_command
from outrider.services.verify import command as verify_command

RUNNER = CliRunner()
RUNS = {
    "doctor": (doctor_command, "run_doctor"),
    "verify": (verify_command, "run_verify"),
    "tune": (tune_command, "run_tune"),
}


def options_of(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: str) -> Any:
    """Return the options with which the command would run."""
    seen: list[Any] = []
    module, run = RUNS[command]
    monkeypatch.setattr(module, run, lambda options: seen.append(options) or 0)
    result = RUNNER.invoke(cli.app, [command, *arguments])
    assert result.exit_code == 0, result.output
    return seen[0]


@pytest.mark.parametrize("given", ["localhost:8941", "http://localhost:8941/v1", "localhost:8941/v1/"])
def test_tune_takes_every_form_of_a_url(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    assert options_of(monkeypatch, "tune", "--url", given).url == "http://localhost:8941"
    monkeypatch.setenv("OUTRIDER_URL", given)
    monkeypatch.setenv("OUTRIDER_API_KEY", "hush")
    options = options_of(monkeypatch, "tune")
    assert (options.url, options.api_key) == ("http://localhost:8941", "hush")


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize(
    ("arguments", "target", "draft"),
    [
        ((), DEMO_TARGET, DEMO_DRAFT),
        (("--speculative-algorithm", "EAGLE3"), DEMO_TARGET, DEMO_DRAFT),
        (("--speculative-algorithm", "NGRAM"), DEMO_TARGET, None),
        (("--draft", "none"), DEMO_TARGET, None),
        (("--target", str(DEMO_TARGET)), DEMO_TARGET, None),
        (("--draft", str(DEMO_TARGET)), DEMO_TARGET, DEMO_TARGET),
    ],
    ids=str,
)
def test_without_a_target_the_embedded_pair_is_used(
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    arguments: tuple[str, ...],
    target: Path,
    draft: Path | None,
) -> None:
    options = options_of(monkeypatch, command, *arguments)
    pair = options.stack if command == "tune" else options
    assert (pair.target, pair.draft) == (target, draft)
    if command == "tune":
        assert pair.model_id == (None if "--target" in arguments else "outrider-demo")


@pytest.mark.parametrize("command", RUNS)
def test_the_help_names_the_embedded_pair(command: str) -> None:
    text = re.sub(r"\s+", " ", RUNNER.invoke(cli.app, [command, "--help"]).output)
    assert "[default: (the embedded demo model)]" in text
    assert "[default: (the embedded head; none with another --target)]" in text
