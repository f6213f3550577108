"""The services that docker compose starts and publishes, read from the committed files without Docker.

Their commands are parsed by the command line of the product, so that no flag of the compose file is stale.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from outrider.services.cli import commands as cli
from outrider.services.cli import entrypoints
from outrider.services.stack import launch
from outrider.services.stack.options import StackOptions
from outrider.services.stack.service_checks import check_gateway_flags
from outrider.services.target.settings import TargetSettings
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.rpc.address import grpc_address

ROOT = Path(__file__).resolve().parents[4]
FILE = (ROOT / "docker-compose.yml").read_text()
PROFILES = {
    "gpu": {"outrider"},
    "apart": {"gateway", "target", "draft", "namespaces"},
    "cpu": {"gateway-cpu", "target-cpu", "draft-cpu"},
    "obs": {"prometheus", "grafana"},
}
OBSERVERS = PROFILES["obs"]
ENGINES = ("outrider", "target", "draft", "target-cpu", "draft-cpu")
GATEWAYS = ("outrider", "gateway", "gateway-cpu")
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::-([^}]*))?\}")


def interpolated(value: Any, environment: Mapping[str, str]) -> Any:
    """Return a value of the file with its variables replaced as compose does."""
    if isinstance(value, dict):
        return {key: interpolated(one, environment) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolated(one, environment) for one in value]
    if not isinstance(value, str):
        return value
    return VARIABLE.sub(lambda found: environment.get(found[1]) or found[2] or "", value)


def services(**environment: str) -> dict[str, Any]:
    """Return the services, with these variables set."""
    found: dict[str, Any] = interpolated(yaml.safe_load(FILE)["services"], environment)
    return found


def parsed(name: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> Any:
    """Return the settings or options that a service's command and environment give.

    Raises:
        ConfigurationError: The command line refuses them.
    """
    service = services(**environment)[name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    words = shlex.split(service["command"])
    seen: list[Any] = []

    def keep(settings: Any, *_: object) -> int:
        seen.append(settings)
        raise ConfigurationError("recorded")

    monkeypatch.setattr(launch, "running_stack", keep)
    for entry in ("run_gateway", "run_target", "run_draft"):
        monkeypatch.setattr(entrypoints, entry, keep)
    monkeypatch.setattr("outrider.shared.obs.queued_stream.queue_stderr", lambda **_: None)
    # Dockerfile: the entry point is `outrider serve`, unless the service has its own.
    result = CliRunner().invoke(cli.app, words if name == "outrider" else ["serve", *words])
    assert len(seen) == 1, result.output or result.exception
    return seen[0]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_starts_its_services(profile: str) -> None:
    found = services()
    started = {name for name, service in found.items() if profile in service["profiles"]}
    assert started == PROFILES[profile]
    for name in started:
        assert set(found[name].get("depends_on", ())) <= started
        for kind in ("ipc", "pid"):
            assert found[name].get(kind, "").removeprefix("service:") in (*started, "shareable", "")


def test_plain_up_serves_on_a_gpu_after_the_example_is_copied() -> None:
    assert "\nCOMPOSE_PROFILES=gpu\n" in (ROOT / ".env.example").read_text()
    # Operators keep secrets in .env.
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()
    assert ".env" in (ROOT / ".dockerignore").read_text().splitlines()


def test_the_example_names_every_variable_with_its_default() -> None:
    example = dict(re.findall(r"^#?(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
    used: dict[str, set[str]] = {}
    for name, default in VARIABLE.findall(FILE):
        used.setdefault(name, set()).add(default)
    assert example.keys() - {"COMPOSE_PROFILES"} == used.keys()
    wrong = {name: (example[name], values) for name, values in used.items() if example[name] not in values}
    assert wrong == {}
    assert {name for name, values in used.items() if len(values) > 1} == {"OUTRIDER_GPUS"}


def test_operations_page_lists_every_variable() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name, _ in VARIABLE.findall(FILE) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", ENGINES)
def test_the_command_line_accepts_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"OUTRIDER_TARGET": "/models/a b", "OUTRIDER_DRAFT": "/models/head"}
    flags |= {f"OUTRIDER_{kind}FLAGS": "--num-steps 3 --log-json" for kind in ("", "TARGET_", "DRAFT_")}
    found = parsed(name, monkeypatch, **flags)
    assert found.num_steps == 3
    assert found.log_json
    if isinstance(found, StackOptions):
        assert (found.target, found.draft, found.port, found.grpc) == (
            Path("/models/a b"),
            Path("/models/head"),
            8000,
            8001,
        )
    elif isinstance(found, TargetSettings):
        assert found.model == Path("/models/a b")
        assert found.device == ("auto" if name == "target-cpu" else "cuda:0")
    else:
        assert found.target_weights == Path("/models/a b")
        assert found.draft == Path("/models/head")
        assert found.device == ("auto" if name == "draft-cpu" else "cuda:1")


def test_target_and_draft_of_a_profile_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for suffix, scheme in (("", "ipc://"), ("-cpu", "unix:")):
        target, draft = (parsed(f"{name}{suffix}", monkeypatch) for name in ("target", "draft"))
        assert target.draft == draft.listen == f"{scheme}/run/outrider/draft.sock"
        gateway = parsed(f"gateway{suffix}", monkeypatch)
        assert gateway.target == (target.listen,)
        for settings in (target, draft, gateway):
            settings.model_copy(update={"device": "cpu"}).check()


def test_the_health_checks_ask_the_addresses_that_the_services_listen_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("target", "draft", "target-cpu", "draft-cpu"):
        test = services()[name]["healthcheck"]["test"]
        listen = grpc_address(parsed(name, monkeypatch).listen, "listen")
        assert test[test.index("--grpc") + 1] == listen


@pytest.mark.parametrize("name", GATEWAYS)
def test_a_gateway_published_to_other_hosts_needs_a_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(**environment: str) -> None:
        found = parsed(name, monkeypatch, **environment)
        if isinstance(found, StackOptions):
            check_gateway_flags(found)
        else:
            found.check()

    check()
    with pytest.raises(ConfigurationError, match="OUTRIDER_API_KEY") as caught:
        check(OUTRIDER_BIND="0.0.0.0")
    assert caught.value.field == "published_on"
    check(OUTRIDER_BIND="0.0.0.0", OUTRIDER_API_KEY="key")
    ports = services(OUTRIDER_PORT="80")[name]["ports"]
    assert ports == ["127.0.0.1:80:8000", "127.0.0.1:8001:8001"]


def test_a_gateway_serves_the_chosen_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("gateway", monkeypatch).served_model_name == ()
    assert parsed("gateway", monkeypatch, OUTRIDER_MODEL_NAME="a,b").served_model_name == ("a", "b")


FRONT_FILES = {
    "OUTRIDER_API_KEYS_FILE": "api_keys_file",
    "OUTRIDER_ADMIN_API_KEY_FILE": "admin_api_key_file",
    "OUTRIDER_TLS_CERT": "tls_cert",
    "OUTRIDER_TLS_KEY": "tls_key",
    "OUTRIDER_TLS_CA": "tls_ca",
}
PEER_FILES = {
    f"OUTRIDER_{name.upper()}": name
    for name in ("peer_tls_cert", "peer_tls_key", "peer_tls_ca", "peer_token_file")
}


@pytest.mark.parametrize("name", ["gateway", "target", "draft", "gateway-cpu", "target-cpu", "draft-cpu"])
def test_files_of_certificates_keys_and_tokens_are_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = PEER_FILES | (FRONT_FILES if name in GATEWAYS else {})
    unset = parsed(name, monkeypatch)
    assert [getattr(unset, field) for field in variables.values()] == [None] * len(variables)
    files = {variable: f"/etc/outrider/{field}" for variable, field in variables.items()}
    found = parsed(name, monkeypatch, **files)
    for field in variables.values():
        assert getattr(found, field) == Path("/etc/outrider") / field


def test_one_container_gets_the_files_of_the_gateway() -> None:
    environment = services(OUTRIDER_TLS_CERT="/etc/outrider/cert.pem")["outrider"]["environment"]
    assert environment["OUTRIDER_GATEWAY_TLS_CERT"] == "/etc/outrider/cert.pem"
    for name in GATEWAYS:
        assert "--own-tls" in services()[name]["healthcheck"]["test"]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, ""),
        ({"OUTRIDER_API_KEY": "sk-users"}, "sk-users"),
        ({"OUTRIDER_API_KEY": "sk-users", "OUTRIDER_METRICS_API_KEY": "sk-admin $x"}, "sk-admin $x"),
        ({"OUTRIDER_METRICS_API_KEY": "sk-admin"}, "sk-admin"),
    ],
)
def test_prometheus_sends_its_own_key_or_else_the_key_of_the_clients(
    tmp_path: Path, given: dict[str, str], key: str
) -> None:
    service = services(**given)["prometheus"]
    (script,) = service["command"]
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())[
        "scrape_configs"
    ][0]
    file = tmp_path / "key"
    # Compose passes $$ as $ to the shell of the container.
    write, _, start = script.replace("$$", "$").partition("exec ")
    assert start.startswith("/bin/prometheus")
    write = write.replace(scrape["authorization"]["credentials_file"], shlex.quote(str(file)))
    subprocess.run([*service["entrypoint"], write], check=True, env=service["environment"], timeout=30)
    assert file.read_text() == key
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["outrider", "target", "draft"])
def test_the_gpus_are_a_variable(name: str) -> None:
    service = services(OUTRIDER_GPUS="2,3")[name]
    assert service["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "compute", "utility"]}


def test_target_and_draft_apart_share_memory_and_see_both_gpus() -> None:
    found = services()
    for name in ("target", "draft"):
        assert found[name]["ipc"] == found[name]["pid"] == "service:namespaces"
        assert found[name]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert found["namespaces"]["ipc"] == "shareable"
    assert found["namespaces"]["init"] is True, "an init process reaps the children of both"
    assert found["namespaces"]["shm_size"] == "2gb"


@pytest.mark.parametrize("name", [name for names in PROFILES.values() for name in sorted(names)])
def test_a_container_is_bounded(name: str) -> None:
    service = services()[name]
    assert service["restart"] == "on-failure:5", "a wrong model must not restart for ever"
    assert service["logging"]["options"] == {"max-size": "50m", "max-file": "5"}
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["stop_grace_period"] == "120s"
    assert bool(service.get("ports")) == (name in {*GATEWAYS, *OBSERVERS})
    if name in OBSERVERS:
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        return
    assert service["user"] == "10001:10001"
    if name != "namespaces":
        assert service["healthcheck"]["start_period"] == "1800s", "a large model takes minutes to load"
        mounts = {one["target"]: one for one in service["volumes"] if isinstance(one, dict)}
        assert all(one["read_only"] and one["type"] == "bind" for one in mounts.values())
        assert mounts.keys() == {"/models", "/etc/outrider"}


@pytest.mark.parametrize("name", ENGINES)
def test_kernels_tiles_and_downloads_outlive_a_container(name: str) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    variables = dict(re.findall(r"(TRITON_CACHE_DIR|HF_HOME)=(\S+)", dockerfile))
    for volume, folder in (("kernels", variables["TRITON_CACHE_DIR"]), ("hub", variables["HF_HOME"])):
        owners = re.findall(rf"chown (\S+) {folder}\b", dockerfile)
        assert owners == ["outrider:outrider"], "an empty named volume takes its owner from the image"
        assert f"{volume}:{folder}" in services()[name]["volumes"]
        assert volume in yaml.safe_load(FILE)["volumes"]
    own = services(OUTRIDER_HF_CACHE="/data/hf")
    assert f"/data/hf:{variables['HF_HOME']}" in own[name]["volumes"]


def test_the_engine_image_has_a_c_compiler() -> None:
    """Triton compiles the launchers of its kernels at run time."""
    engine = (ROOT / "Dockerfile").read_text().partition("AS engine")[2]
    assert "gcc libc6-dev" in engine
    assert "Python.h" in engine
