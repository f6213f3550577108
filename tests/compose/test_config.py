"""Docker compose accepts the file in every profile. Needs the compose program, but no engine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {
    "gpu": {"outrider"},
    "apart": {"gateway", "target", "draft", "namespaces"},
    "cpu": {"gateway-cpu", "target-cpu", "draft-cpu"},
    "obs": {"prometheus", "grafana"},
}


def config(*arguments: str, **variables: str) -> dict[str, Any]:
    """Return the file as compose resolves it."""
    # Not at the top, because the engine of test_compose.py may install the program first.
    program = [found] if (found := shutil.which("docker-compose")) else ["docker", "compose"]
    done = subprocess.run(
        [*program, *arguments, "config"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


@pytest.mark.parametrize("profile", NEEDED)
def test_compose_accepts_the_profile(profile: str) -> None:
    services = config("--profile", profile)["services"]
    assert services.keys() >= NEEDED[profile]
    flags = "--tp 2 --kv-tokens 4096"
    given = config("--profile", "gpu", OUTRIDER_FLAGS=flags, OUTRIDER_TARGET="org/model")["services"]
    words = shlex.split(given["outrider"]["command"])
    assert words[-4:] == flags.split()
    assert words[words.index("--target") + 1] == "org/model"


def test_gpu_services_reserve_devices_and_share_memory() -> None:
    services = config("--profile", "gpu", "--profile", "apart")["services"]
    for name in ("outrider", "target", "draft"):
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert set(device["capabilities"]) == {"gpu", "compute", "utility"}
    assert services["namespaces"]["ipc"] == "shareable"
    for name in ("target", "draft"):
        assert services[name]["ipc"] == services[name]["pid"] == "service:namespaces"


def test_certificates_keys_and_tokens_reach_the_services_that_need_them() -> None:
    front, peers = "/etc/outrider/front.pem", "/etc/outrider/token"
    profiles = ("--profile", "gpu", "--profile", "apart", "--profile", "cpu")
    given = {"OUTRIDER_TLS_CERT": front, "OUTRIDER_API_KEYS_FILE": front, "OUTRIDER_PEER_TOKEN_FILE": peers}
    services = config(*profiles, **given)["services"]
    for name, service in services.items():
        environment = service.get("environment") or {}
        role = name.removesuffix("-cpu").upper()
        gateway = name in ("outrider", "gateway", "gateway-cpu")
        for variable in ("TLS_CERT", "API_KEYS_FILE"):
            assert environment.get(f"OUTRIDER_GATEWAY_{variable}") == (front if gateway else None)
        apart = role in ("GATEWAY", "TARGET", "DRAFT")
        tokens = [variable for variable, value in environment.items() if value == peers]
        assert tokens == ([f"OUTRIDER_{role}_PEER_TOKEN_FILE"] if apart else [])
    assert services["target"]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert services["draft"]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_the_example_is_a_valid_environment() -> None:
    """With every variable set to the default that the example names, the file stays the same."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    values = dict(
        line.lstrip("#").split("=", 1) for line in lines if line.startswith("#") and "=" in line[:30]
    )
    values = {name: value for name, value in values.items() if name.isupper()}
    values.pop("OUTRIDER_GPUS")
    assert len(values) > 20
    assert config("--profile", "gpu", **values) == config("--profile", "gpu")
