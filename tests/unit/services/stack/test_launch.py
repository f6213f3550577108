"""`outrider up`: the processes and command lines that it plans, and the options that it rejects."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.services.cli import entrypoints
from outrider.services.draft.settings import DraftSettings
from outrider.services.stack import launch
from outrider.services.stack.launch import StackPlan, check_options, plan_stack
from outrider.services.stack.options import StackOptions, Transport
from outrider.services.stack.service_checks import check_target_flags
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.spec.algorithm import Algorithm
from outrider.shared.spec.tree import DraftShape

RUNTIME = Path("/run/x")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return a target folder and a draft folder that look complete."""
    for name in ("target", "draft"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    return tmp_path / "target", tmp_path / "draft"


def command_lines(plan: StackPlan) -> dict[str, str]:
    for child in plan.children:
        assert child.command[0] == launch.outrider_command()
    return {child.name: " ".join(("outrider", *child.command[1:])) for child in plan.children}


def test_cpu_plan_is_three_processes_on_unix_sockets_with_one_port() -> None:
    options = StackOptions(target=Path("/m/t"), draft=Path("/m/d"), device="cpu", num_steps=3, port=9000)
    plan = plan_stack(options, RUNTIME, inproc=False)
    assert command_lines(plan) == {
        "gateway": "outrider serve gateway --host 127.0.0.1 --port 9000 --grpc-port 9001"
        " --target unix:/run/x/target.sock --tokenizer /m/t --log-level info",
        "target": "outrider serve target --listen unix:/run/x/target.sock --model /m/t"
        " --draft unix:/run/x/draft.sock --num-steps 3 --device cpu --dtype auto --log-level info",
        "draft": "outrider serve draft --listen unix:/run/x/draft.sock --draft /m/d --target-weights /m/t"
        " --device cpu --dtype auto --log-level info --num-steps 3",
    }
    assert [child.name for child in plan.children] == ["gateway", "target", "draft"]
    assert plan.url == "http://127.0.0.1:9000"


def test_a_model_id_reaches_the_target_only() -> None:
    lines = command_lines(plan_stack(StackOptions(model_id="outrider-demo"), RUNTIME, inproc=False))
    assert "--served-model-id outrider-demo" in lines["target"]
    assert "outrider-demo" not in lines["gateway"] + lines["draft"]
    assert (
        "--served-model-id" not in command_lines(plan_stack(StackOptions(), RUNTIME, inproc=False))["target"]
    )


def test_the_playground_can_be_turned_off() -> None:
    lines = command_lines(
        plan_stack(StackOptions(gateway_settings={"playground": False}), RUNTIME, inproc=False)
    )
    assert "--no-playground" in lines["gateway"]
    assert "--no-playground" not in lines["target"] + lines["draft"]


def test_the_caps_reach_target_and_draft() -> None:
    lines = command_lines(
        plan_stack(StackOptions(max_steps=20, max_topk=2, max_nodes=200), RUNTIME, inproc=False)
    )
    for service in ("target", "draft"):
        assert "--max-steps 20 --max-topk 2 --max-nodes 200" in lines[service]


@pytest.mark.parametrize("inproc", [False, True])
def test_cuda_graph_flags_are_the_same_for_target_and_draft(inproc: bool) -> None:
    flags = {"disable_cuda_graph": True, "cuda_graph_max_bs": 8}
    lines = command_lines(
        plan_stack(
            StackOptions(num_steps=3, topk=1, num_draft_tokens=4, target_settings=flags),
            RUNTIME,
            inproc=inproc,
        )
    )
    for service in ("target",) if inproc else ("target", "draft"):
        for flag in (
            "--disable-cuda-graph",
            "--cuda-graph-max-bs 8",
            "--num-steps 3 --topk 1 --num-draft-tokens 4",
        ):
            assert flag in lines[service], (service, flag)


def test_capacity_flags_reach_the_services_that_have_them() -> None:
    options = StackOptions(max_running_requests=3, mem_fraction_static=0.4, kv_tokens=4096)
    lines = command_lines(plan_stack(options, RUNTIME, inproc=False))
    assert "--kv-tokens 4096 --max-running-requests 3 --mem-fraction-static 0.4" in lines["target"]
    assert "--kv-tokens 4096" in lines["draft"]
    for service in ("gateway", "draft"):
        assert "--max-running-requests" not in lines[service]
        assert "--mem-fraction-static" not in lines[service]
    assert "--kv-tokens" not in lines["gateway"]


def test_the_gateway_is_asked_over_https_if_it_has_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"tls_cert": "/etc/front.pem", "tls_key": "/etc/front.key"}
    plan = plan_stack(StackOptions(gateway_settings=files), RUNTIME, inproc=True)
    assert plan.url == "https://127.0.0.1:8000"
    assert "--tls-cert /etc/front.pem --tls-key /etc/front.key" in command_lines(plan)["gateway"]
    assert plan_stack(StackOptions(), RUNTIME, inproc=True).url == "http://127.0.0.1:8000"
    monkeypatch.setenv("OUTRIDER_GATEWAY_TLS_CERT", "/etc/front.pem")
    assert plan_stack(StackOptions(), RUNTIME, inproc=True).url == "https://127.0.0.1:8000"


def test_more_running_requests_than_draft_sessions_raise_the_session_limit() -> None:
    few, many = (
        command_lines(plan_stack(StackOptions(max_running_requests=n), RUNTIME, inproc=False))
        for n in (256, 257)
    )
    assert "--max-sessions" not in few["draft"]
    assert "--max-sessions 257" in many["draft"]


@pytest.mark.parametrize("inproc", [False, True])
def test_a_corpus_goes_to_the_process_that_drafts(inproc: bool) -> None:
    options = StackOptions(
        target=Path("/m/t"), draft=None, algorithm=Algorithm.NGRAM, ngram_corpus=Path("/m/texts.jsonl")
    )
    lines = command_lines(plan_stack(options, RUNTIME, inproc=inproc))
    assert [name for name, line in lines.items() if "--ngram-corpus /m/texts.jsonl" in line] == [
        "target" if inproc else "draft"
    ]


def test_a_draft_with_algorithm_none_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"--draft .* conflicts with --speculative-algorithm NONE"
    ) as caught:
        check_options(
            StackOptions(target=pair[0], draft=pair[1], algorithm=Algorithm.NONE, port=launch.free_port())
        )
    assert caught.value.field == "--speculative-algorithm"
    check_options(StackOptions(target=pair[0], draft=None, algorithm=Algorithm.NONE, port=launch.free_port()))


def test_the_draft_in_the_targets_process_gets_its_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[DraftSettings] = []
    monkeypatch.setattr("outrider.services.target.app.run", lambda settings, make: made.append(make) or 0)
    monkeypatch.setattr(
        "outrider.services.draft.inproc.drafter_beside",
        lambda decoder, draft, sizing: made.append(draft.sized(sizing(1))),
    )
    values = {
        "model": "/m",
        "draft": "inproc:",
        "speculative_algorithm": "NGRAM",
        "ngram_corpus": tmp_path / "c.txt",
        "kv_tokens": 8192,
    }
    values |= {
        "num_steps": 3,
        "topk": 2,
        "num_draft_tokens": 7,
        "cuda_graph_max_bs": 8,
        "disable_cuda_graph": True,
    }
    assert (
        entrypoints.run_target(TargetSettings.load({**values, "max_running_requests": 70, "device": "cpu"}))
        == 0
    )
    make = made.pop()
    make(None, lambda size: 8192 * size)  # type: ignore[operator]
    (draft,) = made
    assert (draft.ngram_corpus, draft.kv_tokens, draft.max_sessions) == (tmp_path / "c.txt", 8192, 70)
    assert (draft.usual_shape(), draft.cuda_graph_max_bs, draft.disable_cuda_graph) == (
        DraftShape(3, 2, 7),
        8,
        True,
    )


def test_in_process_plan_has_no_draft_process() -> None:
    plan = plan_stack(StackOptions(target=Path("/m/t"), draft=Path("/m/d")), RUNTIME, inproc=True)
    lines = command_lines(plan)
    assert set(lines) == {"gateway", "target"}
    assert "--draft inproc:/m/d" in lines["target"]
    assert plan.draft_address is None


def test_plan_without_a_draft_serves_plainly() -> None:
    lines = command_lines(plan_stack(StackOptions(target=Path("/m/t"), draft=None), RUNTIME, inproc=False))
    assert set(lines) == {"gateway", "target"}
    assert "--draft none" in lines["target"]


def test_plan_without_tokenizer_and_on_all_interfaces() -> None:
    plan = plan_stack(StackOptions(skip_tokenizer=True, host="0.0.0.0"), RUNTIME, inproc=False)
    assert "--tokenizer" not in command_lines(plan)["gateway"]
    assert plan.url == "http://127.0.0.1:8000"


def test_the_draft_runs_on_the_device_that_was_chosen_for_it() -> None:
    options = StackOptions(device="cuda:1", draft_device="cuda:2", transport=Transport.IPC)
    lines = command_lines(plan_stack(options, RUNTIME, inproc=False))
    assert "--device cuda:1" in lines["target"]
    assert "--device cuda:2" in lines["draft"]
    assert "--draft ipc://" in lines["target"]


def test_a_complete_pair_is_accepted(pair: tuple[Path, Path]) -> None:
    check_options(StackOptions(target=pair[0], draft=pair[1], port=launch.free_port()))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "target/config.json",
            "--target .* has no config.json. Give a complete model folder in Hugging Face layout",
        ),
        ("target/model.safetensors", "--target .* contains no weights .*Download the complete model"),
        ("target/tokenizer.json", "has no tokenizer.json. Add the file, or pass --skip-tokenizer"),
        ("draft/config.json", "--draft .* has no config.json.*--draft none"),
    ],
)
def test_a_missing_file_is_named_with_the_fix(pair: tuple[Path, Path], missing: str, message: str) -> None:
    (pair[0].parent / missing).unlink()
    with pytest.raises(ConfigurationError, match=message):
        check_options(StackOptions(target=pair[0], draft=pair[1], port=launch.free_port()))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--target .*/nothing: there is no such folder"):
        check_options(StackOptions(target=tmp_path / "nothing"))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_named(pair: tuple[Path, Path], offset: int) -> None:
    port = launch.free_port()
    message = f"Cannot listen on 127.0.0.1:{port + offset} .*choose another --port"
    with (
        socket.create_server(("127.0.0.1", port + offset)),
        pytest.raises(ConfigurationError, match=message) as caught,
    ):
        check_options(StackOptions(target=pair[0], draft=pair[1], port=port))
    assert caught.value.field == "--port"


def test_missing_torch_is_named_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'outrider\[engine\]'"):
        check_options(StackOptions(target=pair[0], draft=pair[1]))


def test_rounds_on_the_device_are_for_a_draft_of_its_own(pair: tuple[Path, Path]) -> None:
    kept = {
        "target": pair[0],
        "draft": pair[1],
        "device": "cpu",
        "skip_tokenizer": True,
        "target_settings": {"draft_rounds": "device"},
    }
    check_target_flags(StackOptions(**kept), own_process=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="would do nothing") as caught:
        check_target_flags(StackOptions(**kept), own_process=False)  # type: ignore[arg-type]
    assert caught.value.field == "draft_rounds"


def test_a_share_of_a_gpu_is_refused_on_a_cpu(pair: tuple[Path, Path]) -> None:
    options = StackOptions(target=pair[0], draft=pair[1], device="cpu", mem_fraction_static=0.5)
    with pytest.raises(
        ConfigurationError, match=r"mem_fraction_static = 0\.5 would do nothing: on a CPU"
    ) as caught:
        check_target_flags(options, own_process=True)
    assert caught.value.field == "mem_fraction_static"


def test_the_check_of_the_options_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from outrider.services.stack.launch import check_options, free_port\n"
        "from outrider.services.stack.options import StackOptions\n"
        "flags = {'deterministic': True}\n"
        "check_options(StackOptions(port=free_port(), mem_fraction_static=0.5, target_settings=flags))\n"
        "print('torch' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_the_error_of_a_target_that_refuses_its_flags_names_the_flag(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target exits at its start. The launcher then explains why."""

    def fails(*_: object) -> None:
        raise ConfigurationError("The target service stopped while starting.", field="target")

    monkeypatch.setattr(launch, "Supervisor", lambda *_: nullcontext())
    monkeypatch.setattr(launch, "_wait_until_ready", fails)
    options = StackOptions(target=pair[0], draft=pair[1], device="cpu", skip_tokenizer=True)
    for settings, field in (
        ({"deterministic": True, "attention_backend": "triton"}, "attention_backend"),
        ({"deterministic": True}, "target"),
        ({}, "target"),
    ):
        given = replace(options, port=launch.free_port(), target_settings=settings)
        with pytest.raises(ConfigurationError) as caught, launch.running_stack(given, print, print):
            pass
        assert caught.value.field == field
