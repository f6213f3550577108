"""The gateway's availability over HTTP: overload, readiness, metrics, a lost target, draining."""

from __future__ import annotations

import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from fake_target import FakeTarget, Script, target_process
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import CHAT, TIMEOUT_S, MakeGateway, client_of, error_of
from tokenizers import Tokenizer


def test_a_full_queue_is_a_429_before_any_work(make_gateway: MakeGateway, fake: FakeTarget) -> None:
    arrived = threading.Semaphore(0)
    gate = threading.Event()

    def script(request):
        arrived.release()
        gate.wait(TIMEOUT_S)
        return Script([[9]])

    fake.script = script
    gateway = make_gateway(max_queued_requests=2)
    body = {"prompt": [9], "max_tokens": 1}
    with client_of(gateway) as http, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(2)]
        for _ in waiting:
            assert arrived.acquire(timeout=TIMEOUT_S)
        for path, refused in (
            ("/v1/completions", body),
            ("/generate", {"text": "x"}),
            (CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        ):
            response = http.post(path, json=refused)
            assert response.status_code == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert error_of(response)["code"] == "overloaded"
        assert len(fake.seen) == 2
        gate.set()
        assert [one.result(TIMEOUT_S).status_code for one in waiting] == [200, 200]
        assert http.post("/v1/completions", json=body).status_code == 200


def test_the_queue_is_bounded_in_prompt_tokens_too(make_gateway: MakeGateway, fake: FakeTarget) -> None:
    arrived, gate = threading.Event(), threading.Event()

    def script(request):
        arrived.set()
        gate.wait(TIMEOUT_S)
        return Script([[9]])

    fake.script = script
    with client_of(make_gateway(max_queued_prompt_tokens=100)) as http, ThreadPoolExecutor(1) as pool:
        # A prompt that alone exceeds the limit may still run if nothing else waits.
        first = pool.submit(http.post, "/v1/completions", json={"prompt": [9] * 150, "max_tokens": 1})
        assert arrived.wait(TIMEOUT_S)
        assert http.post("/v1/completions", json={"prompt": [9] * 10, "max_tokens": 1}).status_code == 429
        gate.set()
        assert first.result(TIMEOUT_S).status_code == 200
        assert http.post("/v1/completions", json={"prompt": [9] * 10, "max_tokens": 1}).status_code == 200


def test_metrics_hold_ours_and_the_targets_each_family_once(
    make_gateway: MakeGateway, tokenizer: Tokenizer
) -> None:
    text = (
        "# HELP outrider_prompt_tokens_total theirs\n"
        "# TYPE outrider_prompt_tokens_total counter\n"
        "outrider_prompt_tokens_total 77\n"
        "# HELP outrider_num_requests_running Running.\n"
        "# TYPE outrider_num_requests_running gauge\n"
        "outrider_num_requests_running 3\n"
    )
    target = FakeTarget(tokenizer.get_vocab_size(), prometheus_text=text)
    try:
        with client_of(make_gateway(target=target.start())) as http:
            http.post("/v1/completions", json={"prompt": [9, 9], "max_tokens": 3})
            exposition = http.get("/metrics")
            lines = exposition.text.splitlines()
            assert exposition.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert 'outrider_prompt_tokens_total{model="toy"} 2.0' in lines
            assert 'outrider_generation_tokens_total{model="toy"} 3.0' in lines
            assert 'outrider_request_success_total{finished_reason="length",model="toy"} 1.0' in lines
            assert 'outrider_http_requests_total{route="/v1/completions",status="200"} 1.0' in lines
            assert 'outrider_time_to_first_token_seconds_count{model="toy"} 1.0' in lines
            labels = f'{{model="toy",target="{target.address}"}}'
            assert f"outrider_num_requests_running{labels} 3" in lines
            assert f"outrider_gateway_ready_targets{labels} 1.0" in lines
            families = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
            assert len(families) == len(set(families))
            http.get("/made-up-path")
            assert "made-up-path" not in http.get("/metrics").text
    finally:
        target.stop()


def test_a_gateway_without_its_target_is_alive_and_not_ready(
    make_gateway: MakeGateway, tokenizer: Tokenizer
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    gateway = make_gateway(target=address, ready=False)
    body = {"prompt": [9], "max_tokens": 2}
    with client_of(gateway) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200
        for response in (http.get("/ready"), http.post("/v1/completions", json=body), http.get("/v1/models")):
            assert (response.status_code, error_of(response)["code"]) == (503, "target_unavailable")
            assert response.headers["Retry-After"]
        target = FakeTarget(tokenizer.get_vocab_size())
        target.start(address)
        gateway.wait_ready()
        assert http.get("/ready").status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 200
        # The target reports that it drains, so the gateway accepts no new requests.
        target.set_serving(False)
        gateway.wait_ready(False)
        assert http.post("/v1/completions", json=body).status_code == 503
        target.stop()
        again = FakeTarget(tokenizer.get_vocab_size())
        again.start(address)
        gateway.wait_ready()
        assert http.post("/v1/completions", json=body).status_code == 200
        again.stop()


def test_a_target_that_dies_ends_its_streams_with_an_error(
    make_gateway: MakeGateway, tokenizer: Tokenizer
) -> None:
    target = FakeTarget(tokenizer.get_vocab_size())
    target.script = lambda request: Script([[40]], finish=False)
    gateway = make_gateway(target=target.start())
    with (
        client_of(gateway) as http,
        http.stream(
            "POST", "/v1/completions", json={"prompt": [9], "max_tokens": 9, "stream": True}
        ) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        target.stop()
        rest = [line for line in lines if line]
    assert json.loads(rest[-2][6:])["error"]["code"] == "target_lost"
    assert rest[-1] == "data: [DONE]"


def test_draining_finishes_streams_and_refuses_the_rest(make_gateway: MakeGateway, fake: FakeTarget) -> None:
    gate = threading.Semaphore(0)
    fake.script = lambda request: Script([[40], [41], [42]], gate=gate)
    gateway = make_gateway(drain_notice_s=0.0)
    core = gateway.server.core
    body = {"prompt": [9], "max_tokens": 3}
    with client_of(gateway) as http, grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        assert any(reply.status == health_pb2.HealthCheckResponse.SERVING for reply in watch)
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            drained = gateway.submit(gateway.server.drain())
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with client_of(gateway) as late:
                for response in (late.get("/ready"), late.post("/v1/completions", json=body)):
                    assert (response.status_code, error_of(response)["code"]) == (503, "draining")
                    assert response.headers["Retry-After"]
                assert late.get("/health").status_code == 200
            assert not drained.done()
            gate.release(2)
            assert list(lines)[-2] == "data: [DONE]"
        drained.result(TIMEOUT_S)
        assert core.lifecycle.idle.is_set()
    with pytest.raises(httpx.ConnectError):
        httpx.get(gateway.stack.base_url + "/health")


def test_streams_that_outlast_the_grace_period_are_cancelled(
    make_gateway: MakeGateway, fake: FakeTarget
) -> None:
    fake.script = lambda request: Script([[40]], finish=False)
    gateway = make_gateway(drain_grace_s=0.2)
    body = {"prompt": [9], "max_tokens": 9, "stream": True}
    with client_of(gateway) as http, http.stream("POST", "/v1/completions", json=body) as stream:
        assert next(stream.iter_lines()).startswith("data: ")
        gateway.call(gateway.server.drain())
        assert fake.cancels.get(timeout=TIMEOUT_S).request_id == fake.seen[-1].request_id


def test_a_suspended_target_is_not_ready(make_gateway: MakeGateway, tokenizer: Tokenizer) -> None:
    """A suspended process keeps its connections, so only an overdue answer tells that it hangs."""
    with target_process(tokenizer.get_vocab_size()) as child:
        assert child.stdout
        gateway = make_gateway(target=child.stdout.readline().strip(), target_probe_timeout_s=0.3)
        child.send_signal(signal.SIGSTOP)
        gateway.wait_ready(False)
        with client_of(gateway) as client:
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
        child.send_signal(signal.SIGCONT)
        gateway.wait_ready()
