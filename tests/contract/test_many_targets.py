"""Several targets behind one gateway: names of models, choice of the target, addresses and metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway_thread import GatewayThread
from http_calls import MakeGateway, client_of, error_of
from support.models.toy_text import make_tokenizer
from target_calls import NEW_TOKENS, PROMPT, MakeTarget, body, expected, gated, wait_all


def test_metrics_and_status_tell_the_targets_apart(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    text = "# HELP outrider_x_total x\n# TYPE outrider_x_total counter\noutrider_x_total{} 2\n"
    usage = "outrider_kv_cache_usage_perc"
    text += f"# HELP {usage} x\n# TYPE {usage} gauge\n{usage} "
    targets = [
        make_target(
            model_id=name,
            fingerprint=name,
            prometheus_text=f"{text}{use}\n",
        )
        for name, use in (("a", 0.5), ("b", 0.25))
    ]
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        lines = http.get("/metrics").text.splitlines()
        for target in targets:
            labels = f'{{model="{target.model_id}",target="{target.address}"}}'
            assert f"outrider_x_total{labels} 2" in lines
        assert lines.count("# TYPE outrider_x_total counter") == 1
        status = http.get("/status.json").json()
        assert [(one["address"], one["model"], one["ready"]) for one in status["targets"]] == [
            (one.address, one.model_id, True) for one in targets
        ]
        assert status["metrics"]["outrider_x_total"] == 4
        assert status["metrics"]["outrider_kv_cache_usage_perc"] == 0.375
        assert status["target"]["max_running_requests"] == 32
        assert status["model"]["names"] == ["a", "b"]
        assert len(http.get("/server_info").json()["internal_states"]) == 2
        targets[0].stop()
        wait_all(gateway, 1)
        status = http.get("/status.json").json()
        assert status["ready"]
        assert [one["ready"] for one in status["targets"]] == [False, True]
        assert status["targets"][0]["stats"] is None
        assert status["target"]["max_running_requests"] == 16


def test_requests_are_routed_by_the_model_that_they_name(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    first, twin, other = (make_target(model_id=name, fingerprint=name) for name in ("a", "a", "b"))
    gateway = make_gateway(target=[one.address for one in (first, twin, other)])
    wait_all(gateway, 3)
    with client_of(gateway) as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["a", "b"]
        assert http.get("/v1/models/b").json()["root"] == "b"
        for name in ("b", "b", None):
            prompt = {"prompt": PROMPT, "max_tokens": 2, "model": name}
            reply = http.post("/v1/completions", json={key: one for key, one in prompt.items() if one})
            assert reply.json()["model"] == (name or "a")
        assert len(other.seen) == 2
        assert len(first.seen) + len(twin.seen) == 1
        unknown = http.post("/v1/completions", json={"prompt": PROMPT, "model": "c"})
        assert (unknown.status_code, error_of(unknown)["code"]) == (404, "model_not_found")
        assert "'a', 'b'" in error_of(unknown)["message"]


def test_a_target_that_does_not_empty_its_cache_is_named(
    make_gateway: MakeGateway, make_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.services.gateway.target_client.client.RPC_TIMEOUT_S", 0.5)
    hung, other = make_target(), make_target()
    gateway = make_gateway(target=[one.address for one in (hung, other)])
    wait_all(gateway, 2)
    release, flushed = threading.Event(), threading.Event()
    with client_of(gateway) as http:
        hung.on_flush = lambda: release.wait(20)
        other.on_flush = flushed.set
        refused = http.post("/flush_cache")
        assert (refused.status_code, error_of(refused)["code"]) == (504, "deadline_exceeded")
        assert hung.address in error_of(refused)["message"]
        assert flushed.is_set()
        release.set()


def test_the_metrics_tell_the_models_apart(make_gateway: MakeGateway, make_target: MakeTarget) -> None:
    targets = [make_target(model_id=name, fingerprint=name) for name in ("a", "b")]
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        for name in ("a", "b", "b", "unknown"):
            http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, "model": name})
        too_long = {"prompt": PROMPT * 1000, "max_tokens": 2, "model": "b"}
        assert http.post("/v1/completions", json=too_long).status_code == 400
        lines = http.get("/metrics").text.splitlines()
    for name in (
        "time_to_first_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
    ):
        assert f'outrider_{name}{{model="a"}} 1.0' in lines
        assert f'outrider_{name}{{model="b"}} 2.0' in lines
    assert 'outrider_generation_tokens_total{model="b"} 4.0' in lines
    assert 'outrider_request_success_total{finished_reason="length",model="b"} 2.0' in lines
    assert 'outrider_request_failures_total{model="b",reason="context_length_exceeded"} 1.0' in lines
    assert 'outrider_request_failures_total{model="",reason="model_not_found"} 1.0' in lines
    assert not any('model="unknown"' in line for line in lines)


def test_a_model_may_have_its_own_tokenizer(
    make_gateway: MakeGateway, make_target: MakeTarget, tokenizer_dir: Path, tmp_path: Path
) -> None:
    first, other = (make_target(model_id=name, fingerprint=name) for name in ("a", "b"))
    gateway = make_gateway(
        target=[first.address, other.address],
        tokenizer=None,
        model_tokenizer=[f"b={make_tokenizer(tmp_path)}"],
    )
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        assert http.post("/v1/completions", json={"prompt": "hi", "model": "b"}).status_code == 200
        refused = http.post("/v1/completions", json={"prompt": "hi", "model": "a"})
        assert (refused.status_code, error_of(refused)["code"]) == (400, "no_tokenizer")
    assert other.seen[0].prompt_ids


def test_new_weights_under_the_same_name_take_over_when_the_old_ones_leave(
    make_gateway: MakeGateway, make_target: MakeTarget
) -> None:
    old, new = make_target(fingerprint="old"), make_target(fingerprint="new")
    gateway = make_gateway(target=[old.address, new.address])
    wait_all(gateway, 2)
    with client_of(gateway) as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["toy"]
        assert http.post("/generate", json=body()).status_code == 200
        assert (len(old.seen), len(new.seen)) == (1, 0)
        old.set_serving(False)
        wait_all(gateway, 1)
        assert http.post("/generate", json=body()).status_code == 200
        assert (len(old.seen), len(new.seen)) == (1, 1)


def test_prompts_with_one_prefix_go_to_one_target(make_gateway: MakeGateway, make_target: MakeTarget) -> None:
    targets = [make_target(), make_target()]
    gateway = make_gateway(target=[one.address for one in targets])
    wait_all(gateway, 2)
    prompts = {first: [first] * 64 + [11] for first in (20, 21)}
    with client_of(gateway) as http:
        for first in (20, 21, 20, 20, 21):
            http.post("/v1/completions", json={"prompt": prompts[first], "max_tokens": 2}).raise_for_status()
    assert sorted([seen.prompt_ids[0] for seen in one.seen] for one in targets) == [[20, 20, 20], [21, 21]]


def test_a_file_of_addresses_is_read_again(
    make_gateway: MakeGateway, make_target: MakeTarget, tmp_path: Path
) -> None:
    first, second = make_target(), make_target()
    file = tmp_path / "targets"
    file.write_text(f"# the first\n{first.address}\n")
    gateway = make_gateway(target=[f"file://{file}"], target_refresh_s=0.05)
    with client_of(gateway) as http:
        assert http.post("/generate", json=body()).status_code == 200
        file.write_text(f"{second.address}\n")
        gateway.call(until(gateway, lambda addresses: addresses == [second.address]))
        wait_all(gateway, 1)
        assert http.post("/generate", json=body()).status_code == 200
        # A broken file keeps the addresses.
        file.write_text("")
        assert http.post("/generate", json=body()).status_code == 200
    assert (len(first.seen), len(second.seen)) == (1, 2)


def test_an_address_that_leaves_the_file_finishes_its_requests(
    make_gateway: MakeGateway, make_target: MakeTarget, tmp_path: Path
) -> None:
    gate = threading.Semaphore(0)
    first, second = make_target(), make_target()
    first.script = gated(gate)
    file = tmp_path / "targets"
    file.write_text(first.address)
    gateway = make_gateway(target=[f"file://{file}"], target_refresh_s=0.05)
    with client_of(gateway) as http, http.stream("POST", "/generate", json=body(stream=True)) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        file.write_text(second.address)
        gateway.call(until(gateway, lambda addresses: addresses == [second.address]))
        gate.release(NEW_TOKENS)
        assert list(lines)[-1]["output_ids"] == expected()
    assert not second.seen


async def until(gateway: GatewayThread, arrived: Callable[[list[str]], bool]) -> None:
    """Wait until the addresses of the targets are as wanted."""
    pool = gateway.server.core.targets
    while not arrived([one.address for one in pool.members]):
        await pool.changed()
