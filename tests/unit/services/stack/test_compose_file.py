"""The services that docker compose starts and publishes, read from the committed files without Docker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.services.gateway.settings import GatewaySettings
from outrider.shared.base.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[4]
GPU = {"gateway", "target", "draft"}
CPU = {"gateway-cpu", "target-cpu", "draft-cpu"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


def default_profiles() -> list[str]:
    """Return the profiles that compose reads from the committed `.env` if no --profile is given."""
    lines = [line for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#")]
    values = dict(line.split("=", 1) for line in lines)
    return [name for name in values.get("COMPOSE_PROFILES", "").split(",") if name]


def started(services: dict[str, Any], profiles: list[str]) -> set[str]:
    """Return the services that `up` starts: those without a profile and those with an active profile."""
    return {
        name
        for name, service in services.items()
        if not service.get("profiles") or set(service["profiles"]) & set(profiles)
    }


def gateway_flags(service: dict[str, Any], environment: dict[str, str]) -> dict[str, str]:
    """Return the flags of a gateway's command, with ``${NAME:-default}`` replaced as compose does."""
    words = [
        re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: environment.get(found[1]) or found[2], word)
        for word in service["command"]
    ]
    assert words[0] == "gateway"
    return {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in zip(words[1::2], words[2::2], strict=True)
    }


def test_plain_up_starts_the_gpu_services(services: dict[str, Any]) -> None:
    assert started(services, default_profiles()) == GPU


def test_the_cpu_profile_replaces_them(services: dict[str, Any]) -> None:
    assert started(services, ["cpu"]) == CPU


@pytest.mark.parametrize("profiles", [["gpu"], ["cpu"]])
def test_what_a_service_depends_on_is_started_with_it(services: dict[str, Any], profiles: list[str]) -> None:
    names = started(services, profiles)
    for name in names:
        assert set(services[name].get("depends_on", ())) <= names
        assert services[name].get("ipc", "").removeprefix("service:") in (*names, "shareable", "")


@pytest.mark.parametrize("name", ["target", "draft", "target-cpu", "draft-cpu"])
def test_compiled_kernels_and_tiles_outlive_a_container(services: dict[str, Any], name: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    folder = re.findall(r"^ENV TRITON_CACHE_DIR=(\S+)$", dockerfile, re.MULTILINE)[0]
    owners = re.findall(rf"chown (\S+) {folder} && chmod 700 {folder}$", dockerfile, re.MULTILINE)
    assert owners == ["outrider:outrider"], "an empty named volume takes its owner from the image"
    assert services[name]["user"] == "10001:10001"
    assert f"kernels:{folder}" in services[name]["volumes"]
    assert "kernels" in yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]


@pytest.mark.parametrize("name", ["gateway", "gateway-cpu"])
def test_a_gateway_published_to_other_hosts_needs_a_key(services: dict[str, Any], name: str) -> None:
    service = services[name]
    GatewaySettings(**gateway_flags(service, {})).check()
    flags = gateway_flags(service, {"OUTRIDER_BIND": "0.0.0.0"})
    with pytest.raises(ConfigurationError, match="OUTRIDER_API_KEY") as caught:
        GatewaySettings(**flags).check()
    assert caught.value.field == "published_on"
    GatewaySettings(**flags, api_key=("key",)).check()
    assert service["environment"]["OUTRIDER_GATEWAY_API_KEY"] == "${OUTRIDER_API_KEY:-}"
    assert all(port.startswith("${OUTRIDER_BIND:-127.0.0.1}:") for port in service["ports"])
