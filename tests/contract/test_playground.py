"""The playground and the operator's page: their files, headers and keys, and the data of GET /status.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fake_target import FakeTarget
from gateway_thread import GatewayThread
from http_calls import CHAT, MakeGateway, client_of, error_of

from outrider.services.gateway.playground.pages import FOLDER, TYPES, load_files
from outrider.services.gateway.recent_load import RecentLoad

FILES = load_files()


@pytest.fixture
def http(gateway: GatewayThread) -> Iterator[httpx.Client]:
    with client_of(gateway) as client:
        yield client


@pytest.mark.parametrize("path", FILES)
def test_every_file_is_served_with_a_policy_that_allows_no_other_host(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 200
    assert response.content == FILES[path].content
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:", policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    again = http.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_no_file_names_another_host_and_every_file_has_a_header() -> None:
    for file in FOLDER.iterdir():
        if file.suffix in TYPES:
            text = file.read_text()
            hosts = set(re.findall(r"https?://[^/\"'\s)]+", text)) - {"http://www.w3.org"}
            assert hosts == set(), file.name
        if file.suffix in (".js", ".css"):
            assert text.startswith(("// ", "/* ")), f"{file.name} has no header comment"


def test_pages_load_only_files_that_are_served() -> None:
    for path, file in FILES.items():
        text = file.content.decode()
        named = [*re.findall(r"(?:src|href)=\"(/[^\"]*)\"", text)]
        named += [f"/playground/{name}" for name in re.findall(r"from '\./([^']+)'", text)]
        assert set(named) <= FILES.keys(), path


@pytest.mark.parametrize(
    "path", ["/playground/pages.py", "/playground/..%2fapp.py", "/playground/", "/playground/x.js"]
)
def test_no_other_file_can_be_requested(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_with_keys_the_pages_are_open_and_their_calls_are_not(make_gateway: MakeGateway) -> None:
    with client_of(make_gateway(api_key=("right",))) as http:
        for path in FILES:
            assert http.get(path).status_code == 200
        # The pages know that they need a key, so opening them causes no errors.
        assert all(b"<body data-needs-key>" in http.get(path).content for path in ("/", "/status"))
        errors = http.get("/status.json", headers={"Authorization": "Bearer right"}).json()["errors"]
        assert errors == []
        for path in ("/status.json", "/server_info", "/v1/models", "/openapi.json"):
            assert http.get(path).status_code == 401
            assert http.get(path, headers={"Authorization": "Bearer right"}).status_code == 200


def test_a_setting_turns_the_pages_off(make_gateway: MakeGateway) -> None:
    with client_of(make_gateway(playground=False)) as http:
        assert {http.get(path).status_code for path in FILES} == {404}
        assert http.get("/status.json").status_code == 200


def test_the_status_names_load_memory_speculation_and_metrics(http: httpx.Client) -> None:
    status = http.get("/status.json").json()
    assert status["ready"] is True
    assert status["model"]["names"] == ["toy"]
    assert status["target"]["draft"] == {
        "state": "on",
        "uptime_s": 61.5,
        "connections_lost": 2,
        "algorithm": "EAGLE3",
        "model": None,
        "num_steps": 5,
        "topk": 4,
        "num_draft_tokens": 16,
    }
    assert (status["target"]["uptime_s"], status["targets"][0]["connections_lost"]) == (185.5, 0)
    assert status["metrics"]["outrider_gateway_uptime_seconds"] > 0
    assert status["target"]["kv_pages"].keys() == {"total", "free", "held"}
    assert status["target"]["auto"]["reason"] == "idle"
    used = status["target"]["resources"]
    assert (used["weight_bytes"], used["graphs_recorded"], used["graphs_left"]) == (2**30, 7, 0)
    assert (used["draft_transport"], used["draft_on_device"], used["draft_features"]) == (
        "ipc",
        True,
        ["mailbox"],
    )
    assert {"enabled", "hit_tokens"} <= status["target"]["prefix_cache"].keys()
    assert status["metrics"]["outrider_gateway_target_ready"] == 1
    assert not any("_bucket" in name or "_created" in name for name in status["metrics"])


def test_the_status_lists_the_last_errors_and_counts_equal_ones(make_gateway: MakeGateway) -> None:
    with client_of(make_gateway()) as http:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}
        for _ in range(3):
            error = error_of(http.post(CHAT, json=body))
        http.get("/nope")
        newest, older = http.get("/status.json").json()["errors"]
    assert (newest["status"], newest["reason"], newest["count"]) == (404, "not_found", 1)
    assert (older["route"], older["status"], older["message"], older["count"]) == (
        CHAT,
        400,
        error["message"],
        3,
    )


def test_the_status_lists_errors_in_the_format_of_anthropic(make_gateway: MakeGateway) -> None:
    with client_of(make_gateway()) as http:
        error = error_of(http.post("/v1/messages", json={"messages": []}))
        (newest,) = http.get("/status.json").json()["errors"]
    assert (newest["route"], newest["status"], newest["message"]) == ("/v1/messages", 400, error["message"])


def test_a_failed_readiness_probe_is_no_error(make_gateway: MakeGateway, tmp_path: Path) -> None:
    with client_of(make_gateway(target=f"unix:{tmp_path}/none.sock", ready=False)) as http:
        assert http.get("/ready").status_code == 503
        assert http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]}).status_code == 503
        assert [one["route"] for one in http.get("/status.json").json()["errors"]] == [CHAT]


def test_the_status_remembers_the_load_of_the_last_seconds(make_gateway: MakeGateway) -> None:
    now = [100.0]
    gateway = make_gateway()
    gateway.server.core.metrics.recent = RecentLoad(lambda: now[0])
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    with client_of(gateway) as http:
        made = http.post(CHAT, json=body).json()["usage"]["completion_tokens"]
        now[0] += 2
        recent = http.get("/status.json").json()["recent"]
    assert (recent["tokens"], recent["running"]) == ([made, 0], [1, 0])
    assert recent["accept_length"][1] is None


def test_the_status_counts_lost_connections_to_a_target(
    make_gateway: MakeGateway, make_target: Callable[..., FakeTarget]
) -> None:
    target = make_target()
    address = target.address
    gateway = make_gateway(target=address)
    target.stop()
    gateway.wait_ready(False)
    with client_of(gateway) as http:
        status = http.get("/status.json").json()
        assert status["targets"][0]["connections_lost"] == 1
        target.start(address)
        gateway.wait_ready()
        lines = http.get("/metrics").text.splitlines()
    labels = f'{{model="toy",target="{address}"}}'
    assert f"outrider_gateway_target_connections_lost_total{labels} 1.0" in lines


def test_pages_answer_head_and_options(http: httpx.Client) -> None:
    for path in FILES:
        head = http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert http.options(path).headers["allow"] == "GET, HEAD, OPTIONS"


def test_the_status_without_a_target_says_so(make_gateway: MakeGateway, tmp_path: Path) -> None:
    with client_of(make_gateway(target=f"unix:{tmp_path}/none.sock", ready=False)) as http:
        status = http.get("/status.json").json()
    assert (status["ready"], status["target"], status["model"]) == (False, None, None)
    assert json.dumps(status["metrics"])
