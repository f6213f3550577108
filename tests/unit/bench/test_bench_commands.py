"""`outrider bench` commands: every command runs on a CPU in small sizes, and flag errors name the flag."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import outrider.kernels
from outrider.bench.kernels import command as kernel_bench
from outrider.bench.measure import latency
from outrider.bench.measure.clock import measure
from outrider.bench.measure.latency import shrinking_lengths
from outrider.bench.stacks.engine_stack import EngineOptions, running_engine
from outrider.bench.stacks.remote_draft import DraftTransport
from outrider.bench.stacks.shapes import named_shape
from outrider.services.cli.commands import app
from outrider.services.stack.mps import PROGRAM
from outrider.shared.base.errors import ConfigurationError

RUNNER = CliRunner()
CPU_APART = ("--shape", "tiny", "--device", "cpu", "--rounds", "chain3", "--transport", "unix")
CALLED = re.compile(r"[\w.]+(?: and [\w.]+)*")
"""Start of a case's name: one function or two, each preceded by its package if the name is ambiguous."""
NOT_LAUNCHED = {
    "box_shape": "returns a size for the caller's allocation",
    "can_exchange": "answers a question on the host",
    "can_pass": "answers a question on the host",
    "choose_tile": "chooses on the host",
    "inbox_shape": "returns a size for the caller's allocation",
    "make_rule_state": "allocates tensors",
    "num_candidates": "returns a size",
    "row_paths": "plain torch, called once for all layers of a pass",
}
"""Public functions of the kernels' packages that launch no kernel, with the reason."""
LATENCY = ("--shape", "tiny", "--device", "cpu", "--prompt", "16", "--new-tokens", "12", "--repeats", "1")


def run(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["bench", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["case"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.parametrize("transport", ["inproc", "unix"])
def test_latency_measures_rounds_and_prefill(tmp_path: Path, transport: str) -> None:
    flags = (
        "--rounds",
        "plain,chain3@3,3/2/6@2",
        "--batch",
        "1,2",
        "--prefill",
        "24",
        "--transport",
        transport,
    )
    output = run("latency", *LATENCY, *flags, "--output", str(tmp_path / "l.json"))
    assert "round tree 3/2/6, batch 2" in output
    assert "latency: cpu, synthetic acceptance" in output
    written = json.loads((tmp_path / "l.json").read_text())
    assert written["settings"]["transport"] == transport
    assert written["settings"]["weights"] == "random"
    assert written["start"]["seconds"] > written["start"]["engine_s"] > 0
    assert written["start"]["kernels_compiled"] == written["graphs"] == 0, "a CPU has neither"
    rows = rows_of(tmp_path / "l.json")
    assert [row for row in rows if row.startswith("round")] == [
        f"round {kind}, batch {batch}" for kind in ("plain", "chain 3", "tree 3/2/6") for batch in (1, 2)
    ]
    assert rows["round plain, batch 2"]["acceptance"] == "none"
    assert rows["round plain, batch 2"]["rounds"] == 11
    chain = rows["round chain 3, batch 1"]
    assert chain["acceptance"] == "synthetic, per-position rates 1, 1"
    assert chain["accept_length"] == pytest.approx(11 / 4), "three tokens a round, fewer in the last round"
    assert chain["rounds"] == 4
    assert all(row["ratio"] > 0 and row["floor"] > 0 for row in rows.values())
    assert rows["prefill 24"]["tflops"] > 0
    assert rows["prefill 24"]["share_of_matrix_rate"] > 0
    assert "rounds_without_draft" not in chain


def test_the_multi_process_service_lasts_as_long_as_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    program = tmp_path / PROGRAM
    program.write_text(
        f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY" $@ $(cat) >> {calls}\n'
        'touch "$CUDA_MPS_PIPE_DIRECTORY/control"\n'
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        latency, "check_mps_device", lambda _device: None
    )  # the CPU takes the place of a shared GPU
    flags = ("--rounds", "chain3", "--batch", "1", "--prefill", "none", "--transport", "unix", "--mps")
    run("latency", *LATENCY, *flags, "--output", str(tmp_path / "l.json"))
    written = json.loads((tmp_path / "l.json").read_text())
    assert written["settings"]["mps"] is True
    assert written["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == "pipe"
    assert [line.split()[1:] for line in calls.read_text().splitlines()] == [["-d"], ["quit"]]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_cpu_is_shared_by_no_multi_process_service() -> None:
    with pytest.raises(ConfigurationError, match="--device cpu uses none"):
        run("latency", "--mps", *CPU_APART)


def test_steps_of_a_batch_can_be_waited_for() -> None:
    shape = named_shape("tiny")
    options = EngineOptions(shape, "cpu", "float32", DraftTransport.INPROC, max_batch=2, max_len=64)
    with running_engine(options) as engine:
        before = time.perf_counter()
        running = engine.start_batch([[1, 2, 3], [4, 5, 6, 7]], 40, None)
        running.wait_for_steps(3)
        third = time.perf_counter() - before
        running.wait_for_steps(4)
        seventh = time.perf_counter() - before
        _taken, answers = running.wait()
    assert all(len(answer.arrivals) == 40 for answer in answers)
    assert all(answer.arrivals[2] < third and answer.arrivals[6] < seventh for answer in answers)


def test_the_answers_of_a_batch_may_differ_in_length_and_halve_it_for_a_warm_up() -> None:
    lengths = shrinking_lengths(12, 50)
    steps = sorted(set(lengths))
    assert steps == [24, 36, 48, 50]
    assert [sum(length >= step for length in lengths) for step in steps] == [12, 6, 3, 1]
    with running_engine(
        EngineOptions(named_shape("tiny"), "cpu", "float32", DraftTransport.INPROC, max_batch=12, max_len=64)
    ) as engine:
        _taken, answers = engine.run_batch([[1, 2, 3]] * 12, lengths, None)
    assert [answer.tokens for answer in answers] == lengths


def test_a_batch_with_an_ended_sequence_is_not_waited_for() -> None:
    with running_engine(
        EngineOptions(named_shape("tiny"), "cpu", "float32", DraftTransport.INPROC, max_batch=1, max_len=64)
    ) as engine:
        running = engine.start_batch([[1, 2, 3]], 2, None)
        running.wait_for_steps(1000)
        assert len(running.wait()[1]) == 1


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `outrider bench kernels` take two short samples of each kernel."""
    monkeypatch.setattr(kernel_bench, "measure", partial(measure, samples=2, sample_s=0.0))


@pytest.mark.usefixtures("brief")
def test_kernels_run_against_their_floors(tmp_path: Path) -> None:
    output = run("kernels", "--shape", "tiny", "--device", "cpu", "--output", str(tmp_path))
    rows = rows_of(tmp_path / "kernels-cpu.json")
    for kind in (
        "linear qkv",
        "rms_norm",
        "tree_attention verify",
        "kv_compact",
        "choose_tokens greedy",
        "topk_expand",
        "tree_build",
        "forward 1 rows",
        "propose 3/2/5, batch 2",
    ):
        assert any(case.startswith(kind) for case in rows), kind
    assert all(row["ratio"] > 0 for row in rows.values())
    assert "tree_attention prefill" in output
    launch = json.loads((tmp_path / "kernels-cpu.json").read_text())["settings"]["launch_us"]
    assert all(row["floor"] >= 0.99 * launch for row in rows.values()), "a launch is the smallest floor"

    called = {name for case in rows for name in CALLED.match(case)[0].split(" and ")}  # type: ignore[index]
    functions = Counter(name for package in kernel_packages() for name in public_functions(package))
    assert set(NOT_LAUNCHED) <= set(functions)
    for name, packages in functions.items():
        figures = sum(one.rpartition(".")[2] == name for one in called)
        assert figures >= (0 if name in NOT_LAUNCHED else packages), f"no figure for {name}"


def public_functions(package: str) -> list[str]:
    module = importlib.import_module(f"outrider.kernels.{package}")
    return [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]


def kernel_packages() -> list[str]:
    """Return the packages with a Triton version, except those whose names start with `_`.

    The excepted packages contain code that other kernels inline.
    """
    root = Path(outrider.kernels.__path__[0])
    return sorted(
        file.parent.name for file in root.glob("*/triton.py") if not file.parent.name.startswith("_")
    )


@pytest.mark.usefixtures("brief")
def test_kernels_can_be_picked(tmp_path: Path) -> None:
    run("kernels", "--shape", "tiny", "--device", "cpu", "--only", "cache, tra*", "--output", str(tmp_path))
    kinds = {case.split("_")[0] for case in rows_of(tmp_path / "kernels-cpu.json")}
    assert kinds == {"kv", "tree", "admit", "pack", "post", "fetch", "send"}
    with pytest.raises(ConfigurationError, match="Kinds: linear, product"):
        run("kernels", "--shape", "tiny", "--device", "cpu", "--only", "nothing")


def test_roofline_measures_the_machine(tmp_path: Path) -> None:
    run("roofline", "--device", "cpu", "--small", "--output", str(tmp_path))
    rows = rows_of(tmp_path / "roofline-cpu.json")
    assert rows["device read"]["unit"] == "GB/s"
    assert all(row["value"] > 0 for row in rows.values())
    assert all(row["floor"] > 0 and row["ratio"] for row in rows.values()), "every ceiling needs a floor"


def test_the_table_is_printed() -> None:
    assert "| plain decode step, batch 1 | ≤ 4.1 ms |" in run("table")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("latency", "--shape", "none"), "--shape"),
        (("latency", "--rounds", "5/8"), "--rounds"),
        (("latency", "--batch", "1,x"), "--batch"),
        (("latency", "--prefill", "-3"), "--prefill"),
        (("latency", "--transport", "pigeon"), "--transport"),
        (("latency", "--set", "page_size"), "--set"),
        (("latency", "--mps", "--shape", "tiny", "--device", "cpu", "--rounds", "chain3"), "--mps"),
        (
            (
                "latency",
                "--draft-device",
                "cuda:7",
                "--shape",
                "tiny",
                "--device",
                "cpu",
                "--rounds",
                "chain3",
            ),
            "--draft-device",
        ),
        (
            (
                "latency",
                "--draft-device",
                "cpu",
                "--transport",
                "unix",
                "--shape",
                "tiny",
                "--rounds",
                "plain",
            ),
            "--draft-device",
        ),
        (("latency", "--draft-device", "banana", *CPU_APART), "--draft-device"),
        (("latency", "--draft-device", "cuda:99", *CPU_APART), "--draft-device"),
        (
            ("latency", "--accept-length", "0.5", "--shape", "tiny", "--device", "cpu", "--rounds", "chain3"),
            "--accept-length",
        ),
        (("kernels", "--device", "tpu"), "--device"),
        (("kernels", "--device", "cpu", "--dtype", "int8"), "--dtype"),
        (("serve", "--url", "http://a", "--grpc", "b:1"), "--url"),
        (("serve", "--request-rate", "0"), "--request-rate"),
        (("serve", "--speculation", "maybe"), "--speculation"),
        (("serve", "--api", "soap"), "--api"),
    ],
)
def test_wrong_flags_are_refused_by_name(arguments: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        run(*arguments)
    assert refused.value.field == field


def test_a_setting_of_the_target_can_be_given(tmp_path: Path) -> None:
    run(
        "latency",
        *LATENCY,
        "--rounds",
        "plain",
        "--batch",
        "1",
        "--prefill",
        "none",
        "--set",
        "page_size=4",
        "--output",
        str(tmp_path),
    )
    written = json.loads((tmp_path / "latency-cpu.json").read_text())
    assert written["settings"]["page_size"] == "4"
    assert written["settings"]["transport"] == "none"
    with pytest.raises(ConfigurationError, match="page_size"):
        run("latency", *LATENCY, "--rounds", "plain", "--set", "page_size=none")


def test_bench_alone_is_the_speculation_benchmark() -> None:
    for command in ((), ("speculation",)):
        with pytest.raises(ConfigurationError, match="nothing to compare"):
            run(*command, "--draft", "none")
