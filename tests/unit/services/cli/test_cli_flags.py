"""Every flag in the help texts is accepted under each of its names, and reaches its setting or service."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.cli import entrypoints
from outrider.services.cli.flags import TARGET_FLAGS
from outrider.services.cli.settings_options import ALIASES
from outrider.services.cli.up import OWN_GATEWAY_SETTINGS
from outrider.services.draft.settings import DraftSettings
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.stack import launch
from outrider.services.stack.launch import check_options, free_port, plan_stack
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.service_checks import check_target_flags
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.base.settings import ServiceSettings, flag_name
from outrider.shared.spec.algorithm import Algorithm

torch.set_num_threads(1)
RUNNER = CliRunner()
DEMO = Path(__file__).parents[4] / "models" / "demo"

UP: Mapping[str, tuple[str, Any]] = {
    "target": ("/m/t", Path("/m/t")),
    "draft": ("/m/d", Path("/m/d")),
    "algorithm": ("ngram", Algorithm.NGRAM),
    "token_map": ("/m/map.pt", Path("/m/map.pt")),
    "ngram_corpus": ("/m/texts.txt", Path("/m/texts.txt")),
    "device": ("cpu", "cpu"),
    "dtype": ("float16", "float16"),
    "num_steps": ("3", 3),
    "topk": ("2", 2),
    "num_draft_tokens": ("7", 7),
    "max_steps": ("9", 9),
    "max_topk": ("8", 8),
    "max_nodes": ("70", 70),
    "max_running_requests": ("70", 70),
    "mem_fraction_static": ("0.4", 0.4),
    "kv_tokens": ("8192", 8192),
    "grammar_backend": ("llguidance", "llguidance"),
    "tp": ("2", 2),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("9100", 9100),
    "skip_tokenizer": ("", True),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("think", "think"),
    "transport": ("inproc", Transport.INPROC),
    "mps": ("", True),
    "draft_device": ("cuda:3", "cuda:3"),
    "standby": ("", True),
    "playground": ("", True),
    "log_level": ("debug", "debug"),
    "log_json": ("", True),
    "grpc_port": ("9300", 9300),
    "deterministic": ("", True),
    "quantization": ("fp8", "fp8"),
    "kv_cache_dtype": ("fp8_e4m3", "fp8_e4m3"),
    "attention_backend": ("reference", "reference"),
    "enable_torch_compile": ("", True),
    "torch_compile_max_bs": ("77", 77),
    "cuda_graph_max_bs": ("78", 78),
    "disable_tile_trial": ("", True),
    "disable_cuda_graph": ("", True),
    "disable_prefix_cache": ("", True),
    "overlap_schedule": ("off", "off"),
    "disable_overlap_schedule": ("", True),
    "max_packed_rows": ("512", 512),
    "prefill_budget_ms": ("7.5", 7.5),
    "tp_timeout_s": ("9.5", 9.5),
    "tp_all_reduce": ("group", "group"),
    "draft_rounds": ("host", "host"),
}
"""Option of `up` → (text typed after the flag, resulting value)."""
GATEWAY = [name for name in GatewaySettings.model_fields if name not in OWN_GATEWAY_SETTINGS]
"""Settings of the gateway that are options of `up`."""


GROUPS = {"target_settings": TARGET_FLAGS, "gateway_settings": GATEWAY}
"""Field of `StackOptions` → the flags that it contains."""


def options_of(*path: str) -> dict[str, list[str]]:
    """Return option → flags for a command, without --help."""
    command: Any = typer.main.get_command(cli.app)
    for name in path:
        command = command.commands[name]
    return {
        param.name: [*param.opts, *param.secondary_opts]
        for param in command.params
        if param.param_type_name == "option"
    }


def up(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> StackOptions:
    seen: list[StackOptions] = []

    def start(options: StackOptions, *_: object) -> None:
        seen.append(options)
        raise ConfigurationError("options recorded")

    monkeypatch.setattr(launch, "running_stack", start)
    result = RUNNER.invoke(cli.app, ["up", *arguments])
    assert len(seen) == 1, result.output
    return seen[0]


def test_the_table_lists_every_flag_of_up() -> None:
    unknown = options_of("up").keys() - UP.keys()
    # These flags have tests of their own.
    unknown -= {"revision", "draft_revision", "config", "profile", *GATEWAY}
    assert not unknown, f"add {unknown} to UP"
    assert UP.keys() <= options_of("up").keys()


@pytest.mark.parametrize("option", UP)
def test_a_flag_of_up_arrives_under_each_of_its_names(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    typed, wanted = UP[option]
    by_ngrams = option == "ngram_corpus" or wanted is Algorithm.NGRAM
    basis: dict[str, Any] = (
        {"draft": None, "algorithm": Algorithm.NGRAM} if by_ngrams else {"draft": Path("/m/d")}
    )
    group = next((name for name, flags in GROUPS.items() if option in flags), None)
    changed = {group: {option: wanted}} if group else {option: wanted}
    for name in options_of("up")[option]:
        value = not wanted if name.startswith("--no-") else wanted
        arrived = up(monkeypatch, [name, typed] if typed else [name])
        assert (getattr(arrived, group).get(option) if group else getattr(arrived, option)) == value
    if option in ("transport", "skip_tokenizer", "mps", "standby", "playground", "log_json"):
        return
    lines = [
        " ".join(child.command)
        for child in plan_stack(StackOptions(**basis | changed), Path("/run/x"), inproc=False).children
    ]
    shown = "NGRAM" if option == "algorithm" else typed or flag_name(option)
    assert any(shown in line for line in lines), "the flag reaches no service"


def test_the_targets_flags_are_its_settings() -> None:
    """Names, types and defaults agree, and the target accepts each value in the help."""
    for name, flag in TARGET_FLAGS.items():
        setting = TargetSettings.model_fields[name]
        assert setting.annotation is flag.kind or (
            flag.kind is str and issubclass(setting.annotation or object, Enum)
        )
        default = getattr(setting.default, "value", setting.default)
        assert flag.default == ("" if default is False else str(default))
        for value in flag.metavar.split("|") if flag.metavar else ():
            assert name in TargetSettings.load({"model": "/m", name: value}).model_fields_set


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        (
            {"target_settings": {"quantization": "int4"}},
            "quantization",
            "'none' or 'fp8' .flag --quantization",
        ),
        ({"target_settings": {"cuda_graph_max_bs": 0}}, "cuda_graph_max_bs", "greater than or equal to 1"),
        (
            {"target_settings": {"deterministic": True, "attention_backend": "triton"}},
            "attention_backend",
            "omit --attention-backend",
        ),
        ({"target_settings": {"deterministic": True}, "tp": 2}, "deterministic", "not supported with --tp 2"),
    ],
)
def test_up_refuses_what_the_target_would_refuse(values: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_target_flags(StackOptions(device="cpu", **values), own_process=True)
    assert caught.value.field == field
    accepted = {"deterministic": True, "quantization": "fp8"}
    check_target_flags(StackOptions(device="cpu", target_settings=accepted), own_process=True)


def test_up_refuses_a_value_that_the_gateway_would_refuse() -> None:
    options = StackOptions(port=free_port(), device="cpu", gateway_settings={"max_batch": 0})
    with pytest.raises(ConfigurationError, match="greater than or equal to 1") as caught:
        check_options(options)
    assert caught.value.field == "max_batch"


def sample(settings: type[ServiceSettings], name: str) -> list[str]:
    """Return a sample value for a settings flag; nothing for a switch."""
    given = {"device": "cpu", "log_level": "debug", "speculation": "on", "attention_backend": "reference"}
    given["sampling_defaults"] = "openai"
    given |= {"tool_call_parser": "hermes", "reasoning_parser": "think"}
    field = settings.model_fields[name]
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]
    if kinds[0] is bool:
        return []
    if name in given:
        return [given[name]]
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return [str(list(kinds[0])[-1].value)]
    if kinds[0] is float:
        return ["0.5"]
    return ["4096"] if kinds[0] is int and name.endswith("_bytes") else ["64"] if kinds[0] is int else ["/x"]


SERVICES: Mapping[str, tuple[type[ServiceSettings], Sequence[str]]] = {
    "draft": (DraftSettings, ()),
    "target": (TargetSettings, ("--model", "/m")),
    "gateway": (GatewaySettings, ()),
}
FLAGS = [(service, name) for service, (settings, _) in SERVICES.items() for name in settings.model_fields]


@pytest.mark.parametrize(("service", "name"), FLAGS)
def test_a_setting_arrives_by_its_flag(service: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, required = SERVICES[service]
    seen: list[ServiceSettings] = []
    monkeypatch.setattr(entrypoints, f"run_{service}", lambda given: seen.append(given) or 0)
    for flag in (flag_name(name), *ALIASES.get(name, ())):
        before = [] if name == "model" else list(required)
        result = RUNNER.invoke(cli.app, ["serve", service, *before, flag, *sample(settings, name)])
        assert result.exit_code == 0, f"{flag}: {result.output} {result.exception}"
        assert name in seen.pop().model_fields_set


@pytest.mark.parametrize("service", SERVICES)
def test_help_names_every_setting(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = RUNNER.invoke(cli.app, ["serve", service, "--help"]).output
    for name in SERVICES[service][0].model_fields:
        assert all(flag in text for flag in (flag_name(name), *ALIASES.get(name, ())))
    assert "--config" in text


def test_a_service_reads_its_settings_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[DraftSettings] = []
    monkeypatch.setattr(entrypoints, "run_draft", lambda given: seen.append(given) or 0)
    (tmp_path / "draft.json").write_text('{"max_sessions": 3}')
    assert RUNNER.invoke(cli.app, ["serve", "draft", "--config", str(tmp_path / "draft.json")]).exit_code == 0
    assert seen[0].max_sessions == 3


def test_every_flag_of_the_doctor_runs(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n{"prompt_ids": [8, 9]}\n')
    (tmp_path / "map.json").write_text(json.dumps([1, 2, 3]))
    pair = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "eagle3"), "--json"]
    probed = [
        *pair,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--probe",
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--num-prompts",
        "1",
    ]
    runs = {
        "probe": ([*probed, "--tokens", "4", "--speculative-algorithm", "EAGLE3"], 0),
        # Refused, because this head already has a reduced vocabulary.
        "token map": ([*pair, "--speculative-token-map", str(tmp_path / "map.json")], 2),
        "SGLang's name": (["--target", str(DEMO / "target"), "--speculative-draft-model-path", "none"], 0),
    }
    for flag, model in (("--revision", "--target"), ("--draft-revision", "--draft")):
        result = RUNNER.invoke(cli.app, ["doctor", *pair, flag, "v2"])
        assert f"{model} {DEMO}" in str(result.exception), "a folder has no revisions"
    for name, (arguments, code) in runs.items():
        result = RUNNER.invoke(cli.app, ["doctor", *arguments])
        assert result.exit_code == code, f"{name}: {result.output} {result.exception}"
        if name == "probe":
            (first, *_) = json.loads(result.stdout)["probe"]["runs"]
            assert first["tokens"] == 4
    used = {argument for arguments, _ in runs.values() for argument in arguments}
    used |= {"--revision", "--draft-revision"}
    assert {name for names in options_of("doctor").values() for name in names} <= used


def test_every_flag_of_convert_runs(tmp_path: Path) -> None:
    runs = [
        ["convert", "head", str(DEMO / "eagle3"), str(tmp_path / "official"), "--to", "outrider"],
        ["convert", "tokenizer", str(DEMO / "target"), "--output", str(tmp_path / "tokenizer.json")],
    ]
    for arguments in runs:
        result = RUNNER.invoke(cli.app, arguments)
        assert result.exit_code == 0, f"{result.output} {result.exception}"
    used = {argument for arguments in runs for argument in arguments}
    for command in ("head", "tokenizer"):
        assert {name for names in options_of("convert", command).values() for name in names} <= used
    assert (tmp_path / "tokenizer.json").is_file()


def test_the_documentation_names_every_flag_of_up_and_the_doctor() -> None:
    root = Path(__file__).parents[4]
    text = "\n".join(
        file.read_text(encoding="utf-8")
        for file in (root / "README.md", *sorted((root / "docs").glob("*.md")))
    )
    named = set(re.findall(r"--[a-z-]+", text))
    assert [
        names[0] for path in ("up", "doctor") for names in options_of(path).values() if not named & set(names)
    ] == []
