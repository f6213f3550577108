"""The command line: generated settings flags, exit codes, and the client commands with a canned gateway."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import Field
from rich.console import Console
from support.services.json_handler import JsonHandler
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.cli import entrypoints
from outrider.services.cli.settings_options import settings_command
from outrider.services.cli.up import StatusConsole, _echo_to
from outrider.services.stack import launch
from outrider.services.stack.options import StackOptions
from outrider.shared.base.errors import ConfigurationError, UnavailableError
from outrider.shared.base.settings import ServiceSettings, settings_config
from outrider.shared.base.version import installed_version

RUNNER = CliRunner()


class ToySettings(ServiceSettings):
    model_config = settings_config("toy")

    model: Path = Field(description="Model folder.")
    num_steps: int = Field(5, ge=0, description="Depth of drafting.")
    names: tuple[str, ...] = Field((), description="Names.")
    any_model: bool = Field(False, description="Lenient.")
    threads: int | None = Field(None, description="Threads.")


def run_toy(*arguments: str) -> tuple[int, list[ToySettings], Any]:
    seen: list[ToySettings] = []
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(settings_command(ToySettings, lambda settings: seen.append(settings) or 7, "Run a toy."))  # type: ignore[func-returns-value,arg-type]
    result = RUNNER.invoke(app, list(arguments))
    return result.exit_code, seen, result


def test_flags_reach_the_settings_and_the_return_value_is_the_exit_code() -> None:
    code, seen, _ = run_toy(
        "--model",
        "/m",
        "--speculative-num-steps",
        "3",
        "--names",
        "a",
        "--names",
        "b",
        "--any-model",
        "--threads",
        "2",
    )
    assert code == 7
    assert seen[0].model_dump() == {
        "model": Path("/m"),
        "num_steps": 3,
        "names": ("a", "b"),
        "any_model": True,
        "threads": 2,
    }


def test_flag_beats_environment_beats_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "toy.toml"
    file.write_text('model = "/from-file"\nnum_steps = 1\nthreads = 1\n')
    monkeypatch.setenv("OUTRIDER_TOY_NUM_STEPS", "2")
    monkeypatch.setenv("OUTRIDER_TOY_THREADS", "2")
    _, seen, _ = run_toy("--config", str(file), "--threads", "3")
    assert (seen[0].model, seen[0].num_steps, seen[0].threads, seen[0].any_model) == (
        Path("/from-file"),
        2,
        3,
        False,
    )


def test_help_shows_flag_alias_default_and_environment() -> None:
    text = re.sub(r"\s+", " ", run_toy("--help")[2].output)
    for part in (
        "--num-steps",
        "--speculative-num-steps",
        "Depth of drafting.",
        "OUTRIDER_TOY_NUM_STEPS",
        "5",
        "--no-any-model",
        "--config",
    ):
        assert part in text


def test_a_wrong_value_names_field_flag_and_environment() -> None:
    _, _, result = run_toy("--model", "/m", "--num-steps", "-1")
    assert isinstance(result.exception, ConfigurationError)
    assert "--num-steps" in str(result.exception)
    assert "OUTRIDER_TOY_NUM_STEPS" in str(result.exception)


def test_main_prints_an_error_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "up", "--target", "/nonexistent/model"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "error: --target /nonexistent/model: there is no such folder." in capsys.readouterr().err


@pytest.mark.parametrize("service", ["gateway", "target", "draft"])
def test_serve_help_lists_the_settings_of_the_service(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = RUNNER.invoke(cli.app, ["serve", service, "--help"])
    assert result.exit_code == 0
    assert f"OUTRIDER_{service.upper()}_" in re.sub(r"\s+", "", result.output)


@pytest.mark.parametrize("service", ["target", "draft"])
def test_serve_accepts_sglangs_flag_for_the_draft(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(entrypoints, f"run_{service}", lambda settings: seen.append(settings) or 0)
    required = ["--model", "/m"] if service == "target" else []
    result = RUNNER.invoke(
        cli.app, ["serve", service, *required, "--speculative-draft-model-path", "unix:/d.sock"]
    )
    assert result.exit_code == 0, result.output
    assert str(seen[0].draft) == "unix:/d.sock"
    assert "--speculative-draft-model-path" in RUNNER.invoke(cli.app, ["serve", service, "--help"]).output


def test_up_passes_its_capacity_flags_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StackOptions] = []

    def start(options: StackOptions, *_: object) -> None:
        seen.append(options)
        raise ConfigurationError("options recorded")

    monkeypatch.setattr(launch, "running_stack", start)
    RUNNER.invoke(
        cli.app, ["up", "--max-running-requests", "3", "--mem-fraction-static", "0.4", "--kv-tokens", "4096"]
    )
    assert (seen[0].max_running_requests, seen[0].mem_fraction_static, seen[0].kv_tokens) == (3, 0.4, 4096)
    monkeypatch.setenv("COLUMNS", "200")
    text = RUNNER.invoke(cli.app, ["up", "--help"]).output
    assert all(flag in text for flag in ("--max-running-requests", "--mem-fraction-static", "--kv-tokens"))


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("commands", {"torch", "fastapi", "grpc", "httpx"}),
        ("serve", {"torch", "fastapi", "grpc", "httpx", "outrider.bench", "outrider.services.cli.up"}),
    ],
)
def test_importing_the_command_line_stays_light(module: str, heavy: set[str]) -> None:
    code = f"import sys, outrider.services.cli.{module}; print(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_serve_without_the_other_commands_has_the_same_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """`outrider serve` imports less than the other commands do."""
    monkeypatch.setenv("COLUMNS", "200")
    run = [sys.executable, "-m", "outrider.services.cli", "serve"]
    listed = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True).stdout
    assert listed == RUNNER.invoke(cli.app, ["serve", "--help"], prog_name="outrider").output
    refused = subprocess.run([*run, "gateway", "--port", "x"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--port" in refused.stderr


class CannedGateway(JsonHandler):
    """A server with canned answers in the gateway's format. It records the request bodies."""

    bodies: list[dict[str, Any]]
    pieces: tuple[str, ...]
    ready = True

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send_json(200, {"data": [{"id": "toy"}]})
        else:
            self.send_json(200 if type(self).ready else 503, {"status": "ok"})

    def do_POST(self) -> None:
        body = self.read_json()
        if self.path == "/tokenize":
            self.send_json(200, {"count": 5, "max_model_len": 4096})
            return
        type(self).bodies.append(body)
        if body["max_tokens"] == 0:
            self.send_json(
                400,
                {
                    "error": {
                        "message": "max_tokens: must be at least 1.",
                        "type": "invalid_request_error",
                        "param": "max_tokens",
                    }
                },
            )
            return
        self.begin_events()
        chat = self.path.endswith("chat/completions")
        for token, piece in enumerate(type(self).pieces, 5):
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            ids = {"token_ids": [token]} if body.get("return_token_ids") else {}
            self.send_event({"choices": [choice | ids], "usage": None})
        end = {"delta": {}, "text": "", "finish_reason": "stop"}
        self.send_event(
            {
                "choices": [end],
                "speculation": {
                    "accept_length": 3.5,
                    "rounds": 3,
                    "draft_tokens": 30,
                    "accepted_tokens": 5,
                },
                "usage": None,
            }
        )
        self.send_event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 7}})
        self.wfile.write(b": keep-alive\n\ndata: [DONE]\n\n")


@pytest.fixture
def gateway() -> Iterator[str]:
    CannedGateway.bodies, CannedGateway.ready = [], True
    CannedGateway.pieces = ("Paris ", "and ", "Rome.")
    with ThreadingHTTPServer(("127.0.0.1", 0), CannedGateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_generate_streams_the_text_and_prints_a_summary(gateway: str) -> None:
    result = RUNNER.invoke(
        cli.app,
        ["generate", "hi", "--url", gateway, "--seed", "7", "--speculation", "on", "--max-tokens", "9"],
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "Paris and Rome.\n"
    assert result.stderr.startswith(
        "7 tokens in 3 rounds, 2 of them with drafts; accept length 3.50, which counts 2 tokens after the "
        "end; "
    )
    # The speed is left out if the whole text arrives almost at once.
    assert re.search(r"end(; \d+ tokens/s after the first token)?; stop\n$", result.stderr)
    (body,) = CannedGateway.bodies
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert {
        "model": "toy",
        "seed": 7,
        "max_tokens": 9,
        "stream": True,
        "speculation": {"mode": "on"},
    }.items() <= body.items()


def test_generate_raw_completes_the_text_from_standard_input(gateway: str) -> None:
    result = RUNNER.invoke(cli.app, ["generate", "-", "--raw", "--url", gateway], input="Once upon")
    assert result.stdout == "Paris and Rome.\n"
    assert CannedGateway.bodies[0]["prompt"] == "Once upon"


def test_chat_answers_the_lines_of_a_pipe_and_remembers_the_turns(gateway: str) -> None:
    result = RUNNER.invoke(cli.app, ["chat", "--url", gateway], input="first\n\nsecond\n")
    assert result.exit_code == 0
    assert result.stdout == "Paris and Rome.\nParis and Rome.\n"
    roles = [(message["role"], message["content"]) for message in CannedGateway.bodies[1]["messages"]]
    assert roles == [("user", "first"), ("assistant", "Paris and Rome."), ("user", "second")]


def test_chat_without_a_server_fails_even_if_there_is_nothing_to_send() -> None:
    result = RUNNER.invoke(cli.app, ["chat", "--url", "localhost:1"], input="")
    assert result.exit_code == 1
    assert isinstance(result.exception, UnavailableError)


def test_generate_reads_a_pipe_and_prints_json(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_URL", f"{gateway.removeprefix('http://')}/v1")
    result = RUNNER.invoke(cli.app, ["generate", "--json"], input="hi")
    reply = json.loads(result.stdout)
    assert (reply["text"], reply["completion_tokens"]) == ("Paris and Rome.", 7)
    assert reply["token_ids"] == [5, 6, 7]
    assert CannedGateway.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]


def test_generate_names_no_speed_for_an_answer_in_one_event(gateway: str) -> None:
    CannedGateway.pieces = ("Paris and Rome.",)
    result = RUNNER.invoke(cli.app, ["generate", "hi", "--url", gateway])
    assert result.stdout == "Paris and Rome.\n"
    assert "7 tokens in 3 rounds" in result.stderr
    assert "tokens/s" not in result.stderr


@pytest.mark.parametrize("text", ["", " \n"])
def test_generate_refuses_an_empty_standard_input(
    gateway: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", "generate", "--url", gateway])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "standard input is empty. Give the prompt as an argument" in capsys.readouterr().err
    assert CannedGateway.bodies == []


def test_the_version_is_printed() -> None:
    result = RUNNER.invoke(cli.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"outrider {installed_version()}\n")


def test_a_refused_request_shows_the_servers_message(gateway: str) -> None:
    result = RUNNER.invoke(cli.app, ["generate", "hi", "--url", gateway, "--max-tokens", "0"])
    assert "max_tokens: must be at least 1." in str(result.exception)


def test_an_unreachable_gateway_error_explains_how_to_start_it() -> None:
    result = RUNNER.invoke(cli.app, ["generate", "hi", "--url", "http://127.0.0.1:9"])
    assert "Start the services with `outrider up`" in str(result.exception)


@pytest.mark.parametrize(("ready", "code"), [(True, 0), (False, 1)])
def test_health_follows_readiness(gateway: str, ready: bool, code: int) -> None:
    CannedGateway.ready = ready
    assert RUNNER.invoke(cli.app, ["health", "--url", gateway]).exit_code == code


def test_health_of_a_dead_grpc_address_is_1(tmp_path: Path) -> None:
    result = RUNNER.invoke(cli.app, ["health", "--grpc", f"unix:{tmp_path}/none.sock"])
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.output


class ClosedPipe(io.StringIO):
    """An output whose reader has closed the pipe."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_json_lines_of_services_stay_and_other_lines_become_objects() -> None:
    out = io.StringIO()
    echo = _echo_to(Console(file=out), log_json=True)
    echo("target", '{"event": "ready"}')
    echo("draft", "plain [bold]text[/]")
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"event": "ready"},
        {"service": "draft", "event": "plain [bold]text[/]"},
    ]


def test_a_closed_status_output_goes_quiet() -> None:
    """In `outrider up | head`, a closed pipe must not end the threads that supervise the children."""
    console = StatusConsole(file=ClosedPipe())
    console.print("dropped")
    assert console.quiet
    console.print("dropped too")
