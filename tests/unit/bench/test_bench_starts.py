"""`outrider bench` with models computed by `transformers`, and its record of startup times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.bench.load import serve
from outrider.bench.load.open_loop import Experience, summarise_load
from outrider.bench.load.server import Server
from outrider.bench.options import result_file
from outrider.bench.stacks import random_fit
from outrider.bench.stacks.random_target import random_target
from outrider.bench.stacks.shapes import named_shape
from outrider.services.cli.commands import app
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.nn.dummy import RandomTensors
from outrider.shared.nn.generic.model import GenericDecoder

RUNNER = CliRunner()


def test_a_shape_can_be_one_that_transformers_computes(tmp_path: Path) -> None:
    shape = named_shape("granite-tiny")
    decoder = random_target(shape, torch.device("cpu"), torch.float32)
    assert isinstance(decoder, GenericDecoder)
    assert decoder.config.num_layers == 8
    assert decoder.embedding.std() > 0
    assert not isinstance(
        random_target(named_shape("tiny"), torch.device("cpu"), torch.float32), GenericDecoder
    )
    flags = (
        "--shape",
        shape.name,
        "--device",
        "cpu",
        "--prompt",
        "8",
        "--new-tokens",
        "6",
        "--repeats",
        "1",
        "--prefill",
        "none",
    )
    ran = RUNNER.invoke(
        app,
        [
            "bench",
            "latency",
            *flags,
            "--rounds",
            "plain",
            "--batch",
            "1",
            "--output",
            str(tmp_path / "l.json"),
        ],
    )
    assert ran.exit_code == 0, ran.output
    assert json.loads((tmp_path / "l.json").read_text())["rows"][0]["rounds"] == 5


@pytest.mark.parametrize(
    "command", [("roofline", "--small"), ("kernels", "--shape", "tiny"), ("latency", "--shape", "tiny"), ()]
)
def test_no_command_overwrites_a_result_unless_forced(tmp_path: Path, command: tuple[str, ...]) -> None:
    output = tmp_path / "result.json"
    output.write_text("{}")
    with pytest.raises(ConfigurationError, match=r"exists.*--force") as refused:
        RUNNER.invoke(
            app,
            ["bench", *command, "--device", "cpu", "--output", str(output)],
            catch_exceptions=False,
        )
    assert refused.value.field == "--output"
    assert output.read_text() == "{}"


@pytest.mark.parametrize(
    "command",
    [
        ("roofline", "--small"),
        ("kernels", "--shape", "tiny"),
        ("latency", "--shape", "tiny"),
        ("auto", "--shape", "tiny"),
        ("prefix", "--shape", "tiny"),
        ("soak",),
        ("mixed",),
        (),
    ],
)
def test_a_file_in_place_of_the_output_folder_is_refused_before_anything_is_measured(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    taken = tmp_path / "README.md"
    taken.write_text("mine")
    for output in (taken, taken / "result.json"):
        with pytest.raises(ConfigurationError, match=r"README\.md is a file") as refused:
            RUNNER.invoke(
                app,
                ["bench", *command, "--device", "cpu", "--output", str(output), "--force"],
                catch_exceptions=False,
            )
        assert refused.value.field == "--output"
    assert taken.read_text() == "mine"


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.bench.options.os.access", lambda path, mode: False)
    with pytest.raises(ConfigurationError, match="nothing can be written"):
        result_file(tmp_path / "results", "roofline", "cpu", force=False)
    with pytest.raises(ConfigurationError, match="nothing can be written"):
        result_file(tmp_path / "result.json", "roofline", "cpu", force=True)


@pytest.mark.parametrize(
    "command",
    [("auto",), ("latency",), ("kernels", "--only", "forward"), ("prefix", "--shape", "llama3.1-8b")],
)
def test_a_shape_that_does_not_fit_is_refused_before_its_weights_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(random_fit, "device_memory", lambda device: (14 << 30, 24 << 30))
    monkeypatch.setattr(
        RandomTensors, "take_rows", lambda *arguments, **options: pytest.fail("a tensor was allocated")
    )
    with pytest.raises(ConfigurationError, match=r"--shape llama3\.1-8b does not fit") as refused:
        RUNNER.invoke(
            app,
            ["bench", *command, "--device", "cpu", "--output", str(tmp_path)],
            catch_exceptions=False,
        )
    assert refused.value.field == "--shape"
    message = refused.value.message
    assert "as float32, and cpu has 14.0 GiB free of 24.0 GiB" in message
    assert "use --shape llama3.2-3b" in message
    assert "bfloat16" not in message  # 8 billion numbers of two bytes, and the head, do not fit either


def test_sizes_of_shapes_are_those_of_their_weights() -> None:
    shape = named_shape("tiny")
    decoder = random_target(shape, torch.device("cpu"), torch.float32)
    assert random_fit.target_bytes(shape, torch.float32) == pytest.approx(decoder.weight_bytes, rel=0.01)


def test_force_overwrites_a_result(tmp_path: Path) -> None:
    output = tmp_path / "roofline-cpu.json"
    output.write_text("{}")
    flags = ("--device", "cpu", "--small", "--output", str(tmp_path))
    assert RUNNER.invoke(app, ["bench", "roofline", *flags]).exit_code == 1
    assert RUNNER.invoke(app, ["bench", "roofline", *flags, "--force"]).exit_code == 0
    assert json.loads(output.read_text())["rows"]


def test_a_stack_that_is_started_tells_how_long_that_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kernels))
    (kernels / "old").mkdir(parents=True)
    (kernels / "old" / "a.cubin").touch()

    @contextmanager
    def stack(*_: Any) -> Iterator[None]:
        (kernels / "new").mkdir()
        for name in ("b", "c"):
            (kernels / "new" / f"{name}.cubin").touch()
        yield

    async def measured(*_: Any) -> Any:
        summary = summarise_load([Experience(sent=0.0, chunks=[0.1, 0.2], ended=0.2, tokens=2)], None, None)
        return summary, summary

    monkeypatch.setattr(serve, "started_services", stack)
    monkeypatch.setattr(serve, "_measure", measured)
    monkeypatch.setattr(serve, "find_server", lambda url, _key: Server(url, "toy", "outrider"))
    for name, flags, expected in (("own", (), (1, 2)), ("other", ("--url", "http://127.0.0.1:9"), None)):
        output = tmp_path / f"{name}.json"
        ran = RUNNER.invoke(app, ["bench", "serve", "--device", "cpu", "--output", str(output), *flags])
        assert ran.exit_code == 0, ran.output
        start = json.loads(output.read_text())["start"]
        assert (start and (start["kernels_cached"], start["kernels_compiled"])) == expected
        assert start is None or start["seconds"] >= 0
