"""The commands of the README, run on the embedded pair as users run them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from outrider.services.stack.launch import free_port

OUTRIDER = str(Path(sys.executable).parent / "outrider")


def outrider_processes(marker: str = "") -> set[str]:
    """Return process id and command line of each running service whose command line contains `marker`."""
    lines = subprocess.run(
        ["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {line.strip() for line in lines if "outrider serve" in line and marker in line}


@contextmanager
def stack(*flags: str) -> Iterator[str]:
    """Run `outrider up` and yield its URL. Asserts that it drains with exit code 0 and leaves no process."""
    port = free_port()
    process = subprocess.Popen(
        [OUTRIDER, "up", "--port", str(port), *flags], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    lines = []
    runtime = ""
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("up "):
                break
        assert lines[-1].startswith("up "), "".join(lines)
        (gateway,) = outrider_processes(f"--port {port} ")
        runtime = re.search(r"unix:(\S+)/target\.sock", gateway)[1]  # type: ignore[index]
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        process.stderr.close()
        process.wait(60)
    assert process.returncode == 0, rest
    assert outrider_processes(runtime) == set()
    assert not Path(runtime).exists()


def complete(url: str, **body: object) -> dict[str, object]:
    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    body = {"model": model, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_demo_answers_measures_and_leaves_nothing() -> None:
    before = outrider_processes()
    done = subprocess.run([OUTRIDER, "demo", "--tokens", "64"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> List 3 countries and their capitals." in done.stdout
    assert float(re.search(r"accept length (\d+\.\d+)", done.stdout)[1]) > 1.0  # type: ignore[index]
    assert re.search(r"\d+ tokens in \d+ rounds, ", done.stdout)
    assert "the draft runs in its own process on the CPU, over grpc: the demo shows all three" in done.stdout
    assert done.stdout.rstrip().endswith("The playground is then at http://127.0.0.1:8000/.")
    assert re.search(r"Speculation made it \d+\.\d+ × as fast", done.stdout)
    assert outrider_processes() - before == set()


def test_bench_writes_paired_results(tmp_path: Path) -> None:
    flags = ["--num-prompts", "2", "--tokens", "16", "--output", str(tmp_path)]
    done = subprocess.run([OUTRIDER, "bench", *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert [row["temperature"] for row in result["summary"]] == [0.0, 1.0]
    assert len(result["runs"]) == 2 * 2 * 4
    assert all(run["tokens"] == 16 for run in result["runs"])
    assert result["summary"][0]["accept_length"]["on"] > 1.0
    assert {run["kind"] for run in result["runs"]} == {"on", "auto", "off", "no_draft"}


@pytest.mark.parametrize("transport", ["grpc", "inproc"])
def test_both_transports_give_the_plain_text(transport: str) -> None:
    with stack("--transport", transport, "--device", "cpu") as url:
        prompt = "The capital of France is"
        speculative = complete(url, prompt=prompt, speculation={"mode": "on"})
        plain = complete(url, prompt=prompt, speculation={"mode": "off"})
    assert speculative["choices"][0]["text"] == plain["choices"][0]["text"]  # type: ignore[index]
    assert speculative["speculation"]["accept_length"] > 1.0  # type: ignore[index]


def test_a_stack_without_draft_and_tokenizer_serves_token_ids() -> None:
    with stack("--draft", "none", "--skip-tokenizer") as url:
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        body = {
            "model": model,
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
        }
        reply = httpx.post(f"{url}/generate", json=body, timeout=120, trust_env=False).json()
    assert len(reply["output_ids"]) == 8


def test_a_broken_model_stops_the_start_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    (tmp_path / "tokenizer.json").write_text("{}")
    before = outrider_processes()
    command = [OUTRIDER, "up", "--target", str(tmp_path), "--port", str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "error: The" in done.stderr
    assert outrider_processes() - before == set()
