"""Options that `outrider up` shares with the gateway, its settings file, its help text, and hub names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_cli_flags import GATEWAY, RUNNER, sample, up

from outrider.services.cli import commands as cli
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.hub.pair import DEMO_TARGET
from outrider.services.stack import launch
from outrider.services.stack.launch import check_options, free_port, plan_stack
from outrider.services.stack.options import StackOptions
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import flag_name
from outrider.shared.spec.algorithm import Algorithm


@pytest.mark.parametrize("name", GATEWAY)
def test_a_setting_of_the_gateway_is_an_option_of_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = sample(GatewaySettings, name)
    options = up(monkeypatch, [flag_name(name), *value])
    gateway = plan_stack(options, Path("/run/x"), inproc=False).children[0]
    if name == "api_key":
        assert gateway.secrets == {"OUTRIDER_GATEWAY_API_KEY": '["/x"]'}, (
            "a list, because a key may contain a comma"
        )
        assert "/x" not in gateway.command, "keys in the command line show in ps"
    else:
        assert " ".join([flag_name(name), *value]) in " ".join(gateway.command)


def test_the_model_of_up_may_be_positional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert up(monkeypatch, ["/m/t"]).target == Path("/m/t")
    assert up(monkeypatch, ["/m/t"]).draft is None, "the embedded head fits the embedded target only"
    result = RUNNER.invoke(cli.app, ["up", "/m/t", "--model", "/m/u"])
    assert "The model is given twice: /m/t and --target /m/u" in str(result.exception)


def test_only_a_model_that_nobody_named_is_served_as_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert up(monkeypatch, []).model_id == "outrider-demo"
    assert up(monkeypatch, ["--target", str(DEMO_TARGET)]).model_id is None
    assert up(monkeypatch, ["/m/t"]).model_id is None
    named = plan_stack(up(monkeypatch, ["--served-model-name", "x"]), Path("/run/x"), inproc=False)
    assert "--served-model-name x" in " ".join(named.children[0].command)
    monkeypatch.setenv("OUTRIDER_TARGET_SERVED_MODEL_ID", "mine")
    assert up(monkeypatch, []).model_id is None, "the target reads the variable"


def test_a_file_gives_defaults_for_the_options_of_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags override the file, and so do the gateway's environment variables."""
    file = tmp_path / "up.toml"
    file.write_text(
        'model = "/m/t"\nnum-steps = 3\ntopk = 2\nlog_json = true\nmax_choices = 5\nmax_batch = 6\n'
        'served_model_name = ["a", "b"]\nspeculative_algorithm = "ngram"\nquantization = "fp8"\n'
    )
    monkeypatch.setenv("OUTRIDER_GATEWAY_MAX_BATCH", "7")
    options = up(monkeypatch, ["--config", str(file), "--topk", "1"])
    assert (options.target, options.num_steps, options.topk, options.log_json) == (Path("/m/t"), 3, 1, True)
    assert options.algorithm is Algorithm.NGRAM
    assert options.target_settings == {"quantization": "fp8"}
    assert options.gateway_settings == {"max_choices": "5", "served_model_name": ["a", "b"]}
    gateway, target, *_ = plan_stack(options, Path("/run/x"), inproc=False).children
    assert "--served-model-name a --served-model-name b" in " ".join(gateway.command)
    assert all("--log-json" in child.command for child in (gateway, target))
    file.write_text("num_stepps = 3\n")
    result = RUNNER.invoke(cli.app, ["up", "--config", str(file)])
    assert "num_stepps, which is no option of outrider up. Known: " in str(result.exception)


@pytest.mark.parametrize("first", ["profile", "config"])
def test_a_profile_gives_defaults_that_the_configuration_overrides(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"profile": tmp_path / "profile.toml", "config": tmp_path / "up.toml"}
    files["profile"].write_text('speculation_mode = "on"\nnum_steps = 6\ntopk = 4\nnum_draft_tokens = 24\n')
    files["config"].write_text("topk = 2\n")
    names = sorted(files, key=lambda name: name != first)
    flags = [text for name in names for text in (f"--{name}", str(files[name]))]
    options = up(monkeypatch, [*flags, "--num-draft-tokens", "12"])
    assert (options.num_steps, options.topk, options.num_draft_tokens) == (6, 2, 12)
    gateway = plan_stack(options, Path("/run/x"), inproc=False).children[0]
    assert "--speculation-mode on" in " ".join(gateway.command)


def test_a_profile_may_not_name_another_profile(tmp_path: Path) -> None:
    file = tmp_path / "profile.toml"
    file.write_text(f'profile = "{file}"\n')
    result = RUNNER.invoke(cli.app, ["up", "--profile", str(file)])
    assert "profile, which is no option of outrider up" in str(result.exception)


def test_the_help_of_up_is_in_groups() -> None:
    text = RUNNER.invoke(cli.app, ["up", "--help"]).output
    sections = re.split(r"^(\w[\w ]+):$", text, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    for heading, flag in (
        ("Models", "--target"),
        ("Speculation", "--num-steps"),
        ("Hardware and memory", "--kv-tokens"),
        ("Target", "--deterministic"),
        ("Gateway", "--max-queued-requests"),
        ("General", "--config"),
    ):
        assert f"  {flag}" in found[heading]
    assert list(found)[-1] == "General"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"host": "0.0.0.0"},
            "no API key. .*--api-key-file or --api-key,.*--allow-unauthent",
        ),
        ({"gateway_settings": {"max_choices": "0"}}, "max_choices: .*flag --max-choices"),
        ({"grpc_port": 70000}, "--grpc-port must be 0 or between"),
    ],
)
def test_up_refuses_what_the_gateway_would_refuse(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_options(StackOptions(**{"port": free_port(), "device": "cpu", **values}))
    port = free_port()
    check_options(
        StackOptions(
            port=port, device="cpu", host="0.0.0.0", gateway_settings={"allow_unauthenticated": True}
        )
    )


def test_up_warns_that_a_key_on_the_command_line_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "running_stack", lambda *_: _raise())
    assert "shows in the list of processes" in RUNNER.invoke(cli.app, ["up", "--api-key", "k"]).output
    monkeypatch.setenv("OUTRIDER_GATEWAY_API_KEY", "k")
    assert "shows in the list" not in RUNNER.invoke(cli.app, ["up"]).output


def _raise() -> None:
    raise ConfigurationError("stopped")


def test_long_drains_are_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    options = up(monkeypatch, ["--drain-grace-s", "300", "--drain-notice-s", "5"])
    gateway = plan_stack(options, Path("/run/x"), inproc=False).children[0]
    assert gateway.drain_s > 305


def test_both_services_get_the_limit_of_waiting_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    options = up(monkeypatch, ["--max-queued-requests", "4000"])
    gateway, target, *_ = plan_stack(options, Path("/run/x"), inproc=False).children
    assert all("--max-queued-requests 4000" in " ".join(child.command) for child in (gateway, target))


def test_up_serves_the_folders_of_models_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--revision` belongs to the target, `--draft-revision` to the draft."""
    asked: list[tuple[str, str, str | None]] = []

    def find(name: str | Path, flag: str, revision: str | None = None) -> Path:
        asked.append((str(name), flag, revision))
        return Path("/cache") / name

    monkeypatch.setattr("outrider.services.hub.model_folder.model_folder", find)
    names = ["--target", "org/model", "--draft", "org/head"]
    options = up(monkeypatch, [*names, "--revision", "v2", "--draft-revision", "beta"])
    assert (options.target, options.draft) == (Path("/cache/org/model"), Path("/cache/org/head"))
    assert asked == [("org/model", "--target", "v2"), ("org/head", "--draft", "beta")]
