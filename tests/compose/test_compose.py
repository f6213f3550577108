"""The compose file on a real Docker engine: it is built, started, used, broken, repaired and removed.

The tests require root-level access to a Docker engine, through DOCKER_HOST or LOCAL_DOCKER. LOCAL_DOCKER is
the path of a helper program with three commands:

- `up` starts an engine and prints an ``export DOCKER_HOST=…`` line.
- `base IMAGE` builds a substitute for the base image.
- `down` stops the engine.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
STAND_IN_BASE = "outrider-base:local"
PROJECT = "outrider-test"
PORT = 18437
URL = f"http://127.0.0.1:{PORT}"
PROMPT = [{"role": "user", "content": "List 3 countries and their capitals."}]


class Compose:
    """Runs docker compose on this repository's file, in one environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._program = [found] if (found := shutil.which("docker-compose")) else ["docker", "compose"]

    @property
    def base_image(self) -> str:
        """The base image of the build."""
        return self._environment.get("OUTRIDER_BASE_IMAGE", "python:3.11-slim-bookworm")

    def with_variables(self, **variables: str) -> Compose:
        """Return the same project with these environment variables."""
        return Compose({**self._environment, **variables})

    def __call__(self, *arguments: str, timeout_s: float = 120) -> str:
        command = [*self._program, "--project-name", PROJECT, *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}"
        return done.stdout

    def container(self, service: str) -> str:
        """Return the id of a service's container, whether it is running or not."""
        return self("--profile", "cpu", "ps", "-a", "-q", service).split()[-1]

    def docker(self, *arguments: str) -> str:
        """Run the docker client against the same engine and return its output."""
        client = "/usr/bin/docker" if Path("/usr/bin/docker").exists() else "docker"
        return subprocess.run(
            [client, *arguments], env=self._environment, capture_output=True, text=True, check=True
        ).stdout

    def healthy(self, service: str) -> bool:
        """Return whether the container's own health check passes."""
        return (
            self.docker("inspect", "-f", "{{.State.Health.Status}}", self.container(service)).strip()
            == "healthy"
        )


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    helper = os.environ.get("LOCAL_DOCKER")
    environment = {
        **os.environ,
        "OUTRIDER_PORT": str(PORT),
        "OUTRIDER_GRPC_PORT": str(PORT + 1),
        "COMPOSE_DOCKER_CLI_BUILD": "0",
    }
    if "DOCKER_HOST" not in environment:
        assert helper, "no Docker engine: set DOCKER_HOST, or set LOCAL_DOCKER to a helper that starts one"
        started = subprocess.run([helper, "up"], stdout=subprocess.PIPE, text=True, check=True).stdout
        environment["DOCKER_HOST"] = started.strip().partition("DOCKER_HOST=")[2]
    if helper:
        subprocess.run([helper, "base", STAND_IN_BASE], check=True)
        environment |= {"OUTRIDER_BASE_IMAGE": STAND_IN_BASE, "OUTRIDER_BUILD_NETWORK": "host"}
    project = Compose(environment)
    try:
        yield project
    finally:
        project("--profile", "cpu", "down", "--volumes", "--timeout", "5")
        if helper and "DOCKER_HOST" not in os.environ:
            subprocess.run([helper, "down"], check=True)


@pytest.fixture(scope="module")
def images(compose: Compose) -> dict[str, str]:
    """Build both images, and return their names by target of the Dockerfile."""
    compose("--profile", "cpu", "build", timeout_s=1200)
    return {name: f"outrider-{name}" for name in ("gateway", "engine")}


def test_images_have_what_they_need_and_no_more(compose: Compose, images: dict[str, str]) -> None:
    """The gateway has no torch. The engine has a C compiler and Python's headers, for Triton."""
    program = (
        "import importlib.util, pathlib, shutil, sysconfig; "
        "print(importlib.util.find_spec('torch') is not None, shutil.which('gcc') is not None, "
        "(pathlib.Path(sysconfig.get_path('include')) / 'Python.h').exists())"
    )
    base = _bytes_of(compose, compose.base_image)
    for name, found, most in (("gateway", ["False"], 0.4e9), ("engine", ["True", "True", "True"], 3e9)):
        words = compose.docker("run", "--rm", "--entrypoint", "python", images[name], "-c", program).split()
        assert words[: len(found)] == found
        size = _bytes_of(compose, images[name]) - base
        print(f"image {name}: {size / 1e9:.2f} GB on top of the base image")
        assert size < most, "with PyTorch's CPU wheels; docs/operations.md has the figures"


def _bytes_of(compose: Compose, image: str) -> int:
    return int(compose.docker("image", "inspect", "-f", "{{.Size}}", image))


def test_a_wrong_model_does_not_restart_for_ever(compose: Compose, images: dict[str, str]) -> None:
    wrong = compose.with_variables(OUTRIDER_TARGET="/models/missing", OUTRIDER_RESTART="on-failure:2")
    wrong("--profile", "cpu", "up", "-d", "--no-deps", "target-cpu", timeout_s=120)
    container = compose.container("target-cpu")
    state = "{{.State.Status}} {{.State.ExitCode}} {{.RestartCount}}"
    _wait_for(
        lambda: compose.docker("inspect", "-f", state, container).split() == ["exited", "2", "2"],
        180,
        lambda: compose.docker("logs", container),
    )
    wrong("--profile", "cpu", "rm", "-f", "-s", "target-cpu")


def test_the_service_of_one_gpu_serves_in_its_container(compose: Compose, images: dict[str, str]) -> None:
    """Without its GPU, because there is none: the rest of the service `outrider` is taken from the file."""
    service = yaml.safe_load(compose("--profile", "gpu", "config"))["services"]["outrider"]
    environment = [f"--env={name}={value}" for name, value in service["environment"].items()]
    fixed = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true", "--init"]
    mounts = [f"--tmpfs={one}" for one in service["tmpfs"]]
    mounts += [f"--volume={ROOT}/models/demo:/models:ro", f"--publish=127.0.0.1:{PORT}:8000"]
    options = [*fixed, *mounts, *environment, f"--user={service['user']}", "--entrypoint=outrider"]
    command = shlex.split(service["command"])
    container = compose.docker("run", "-d", *options, images["engine"], *command).strip()
    try:
        _wait_for(_ready, 300, lambda: compose.docker("logs", "--tail", "60", container))
        assert _stream(speculation="on").speculation["accept_length"] > 1.0
        compose.docker("stop", "--time", "100", container)
        assert compose.docker("inspect", "-f", "{{.State.ExitCode}}", container).strip() == "0"
    finally:
        compose.docker("rm", "-f", container)


def test_cpu_profile_serves_through_the_death_of_its_draft(compose: Compose, images: dict[str, str]) -> None:
    # 1. Start the services.
    compose("--profile", "cpu", "up", "-d", timeout_s=300)
    services = ("gateway-cpu", "target-cpu", "draft-cpu")
    _wait_for(
        lambda: all(compose.healthy(name) for name in services),
        300,
        lambda: compose("--profile", "cpu", "logs", "--tail", "60"),
    )

    # 2. Answer a chat with speculation.
    whole = _stream(speculation="on")
    assert whole.text.strip()
    assert whole.speculation["accept_length"] > 1.0

    # 3. Kill the draft in the middle of a stream. The stream completes.
    draft = compose.container("draft-cpu")
    first_words = threading.Event()
    killed: list[str] = []

    def kill_draft() -> None:
        first_words.wait(60)
        killed.append(compose.docker("kill", "--signal", "KILL", draft).strip())

    killer = threading.Thread(target=kill_draft)
    killer.start()
    survived = _stream(speculation="on", max_tokens=1500, ignore_eos=True, first_words=first_words)
    killer.join()
    assert killed == [draft]
    assert survived.text.startswith(whole.text)
    assert survived.finish_reason == "length"
    assert survived.completion_tokens == 1500

    # 4. Start the draft again. Speculation resumes.
    compose("--profile", "cpu", "up", "-d", timeout_s=120)
    _wait_for(
        lambda: compose.healthy("draft-cpu"),
        120,
        lambda: compose("--profile", "cpu", "logs", "--tail", "60", "draft-cpu"),
    )
    again = _stream(speculation="on")
    assert again.text == whole.text
    assert again.speculation["accept_length"] > 1.0

    # 5. The gateway runs unprivileged.
    assert compose.docker("exec", compose.container("gateway-cpu"), "id", "-u").strip() == "10001"

    # 6. Taking the project down leaves no container.
    compose("--profile", "cpu", "down", "--timeout", "45", timeout_s=180)
    assert compose.docker("ps", "-q", "--filter", f"label=com.docker.compose.project={PROJECT}").strip() == ""


class Answer:
    """The content of one streamed chat."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self.completion_tokens = 0
        self.speculation: dict[str, Any] = {}


def _stream(
    *,
    speculation: str,
    max_tokens: int = 120,
    ignore_eos: bool = False,
    first_words: threading.Event | None = None,
) -> Answer:
    model = httpx.get(f"{URL}/v1/models", trust_env=False).json()["data"][0]["id"]
    body = {
        "model": model,
        "messages": PROMPT,
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "stream": True,
    }
    body |= {"stream_options": {"include_usage": True}, "speculation": {"mode": speculation}}
    answer = Answer()
    with httpx.stream(
        "POST", f"{URL}/v1/chat/completions", json=body, timeout=180, trust_env=False
    ) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event.get("usage"):
                answer.completion_tokens = event["usage"]["completion_tokens"]
            answer.speculation |= event.get("speculation") or {}
            for choice in event["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                if first_words and len(answer.text) > 40:
                    first_words.set()
    return answer


def _ready() -> bool:
    try:
        return httpx.get(f"{URL}/ready", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _wait_for(condition: Any, timeout_s: float, explain: Any) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        threading.Event().wait(0.5)
