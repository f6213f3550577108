"""API keys from a file: permissions, limits and their headers, over REST and gRPC; admin routes; secrecy."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from fake_target import FakeTarget, Script
from gateway_thread import GatewayThread, free_port
from http_calls import CHAT, TIMEOUT_S, client_of, error_of
from test_process import process, wait_ready

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.gateway.app import PUBLIC_PATHS, create_app
from outrider.services.gateway.keys.admin_routes import ADMIN_PATHS
from outrider.shared.rpc.interceptors import error_from_rpc

USER_PATHS = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"),
    *("/v1/messages/count_tokens", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    *("/v1/models", "/v1/models/{model}", "/get_model_info", "/model_info", "/server_info"),
    *("/get_weight_version", "/weight_version", "/get_load", "/v1/loads", "/v1/responses/input_tokens"),
    *("/get_server_info", "/health_generate", "/abort_request", "/version"),
}
BODY = {"prompt": [9, 9], "max_tokens": 2}
MakeGateway = Callable[..., GatewayThread]


def key_of(name: str) -> str:
    return f"sk-{name}-0123456789"


def auth(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(name)}"}


def write_keys(file: Path, **limits: dict[str, Any]) -> Path:
    """Write a keys file with one key per name."""
    text = ""
    for name, fields in limits.items():
        text += f'[[keys]]\nname = "{name}"\nkey = "{key_of(name)}"\n'
        text += "".join(f"{field} = {toml(value)}\n" for field, value in fields.items())
    fresh = file.with_suffix(".new")
    fresh.touch(0o600)
    fresh.write_text(text)
    os.replace(fresh, file)
    return file


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", '"')


@pytest.fixture
def serve(make_gateway: MakeGateway, tmp_path: Path) -> Callable[..., GatewayThread]:
    def start(**limits: dict[str, Any]) -> GatewayThread:
        return make_gateway(api_keys_file=write_keys(tmp_path / "keys.toml", **limits))

    return start


@contextmanager
def stub_of(gateway: GatewayThread) -> Iterator[gateway_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        yield gateway_pb2_grpc.InferenceStub(channel)


def complete(stub: gateway_pb2_grpc.InferenceStub, name: str, **options: Any) -> Any:
    request = gateway_pb2.CompleteRequest(
        token_ids=gateway_pb2.TokenIds(ids=[9, 9]),
        options=gateway_pb2.GenerationOptions(max_tokens=2, **options),
    )
    return stub.Complete(request, timeout=TIMEOUT_S, metadata=(("authorization", f"Bearer {key_of(name)}"),))


def test_the_openai_client_gets_the_errors_that_it_knows(serve: Callable[..., GatewayThread]) -> None:
    gateway = serve(app={"requests_per_minute": 2}, other={"models": ["else"]})
    url = f"{gateway.stack.base_url}/v1"
    model = httpx.get(f"{url}/models", headers=auth("app")).json()["data"][0]["id"]

    def ask(key: str, **fields: Any) -> Any:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            return client.completions.with_raw_response.create(
                model=model, prompt=[9], max_tokens=1, extra_body=fields
            )

    with pytest.raises(openai.AuthenticationError):
        ask("sk-unknown")
    with pytest.raises(openai.PermissionDeniedError) as denied:
        ask(key_of("other"))
    assert (denied.value.code, denied.value.type, denied.value.param) == (
        "permission_denied",
        "permission_error",
        "model",
    )
    with pytest.raises(openai.PermissionDeniedError, match="priority"):
        ask(key_of("app"), priority=5)
    reply = ask(key_of("app"))
    assert reply.headers["x-ratelimit-limit-requests"] == "2"
    assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    with pytest.raises(openai.RateLimitError) as limited:
        ask(key_of("app"))
    assert limited.value.code == "rate_limit_exceeded"
    assert 1 <= int(limited.value.response.headers["Retry-After"]) <= 30
    assert limited.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "'app'" in limited.value.message


def test_a_limit_refuses_before_the_body_is_read(serve: Callable[..., GatewayThread]) -> None:
    with client_of(serve(app={"requests_per_minute": 1})) as http:
        assert http.post(CHAT, content=b"{", headers=auth("app")).status_code == 415
        assert http.post(CHAT, content=b"{", headers=auth("app")).status_code == 429
        assert http.get("/v1/models", headers=auth("app")).status_code == 200, "GET is not counted"


def test_tokens_of_prompt_and_answer_are_charged(
    serve: Callable[..., GatewayThread], fake: FakeTarget
) -> None:
    fake.script = lambda request: Script([[40], [41, 42], [43]])
    with client_of(serve(app={"tokens_per_minute": 100})) as http:
        reply = http.post("/v1/completions", json={"prompt": [9] * 50, "max_tokens": 4}, headers=auth("app"))
        assert reply.status_code == 200
        # The charge for the answer comes after the headers of the next reply at the latest.
        remaining = int(http.get("/v1/models", headers=auth("app")).headers["x-ratelimit-remaining-tokens"])
        assert 46 <= remaining <= 50
        seen = len(fake.seen)
        reply = http.post("/v1/completions", json={"prompt": [9] * 90, "max_tokens": 4}, headers=auth("app"))
        assert (reply.status_code, error_of(reply)["code"]) == (429, "rate_limit_exceeded")
        assert len(fake.seen) == seen, "the target has not seen the request"


def test_sequences_at_once_are_counted_until_they_end(
    serve: Callable[..., GatewayThread], fake: FakeTarget
) -> None:
    gate = threading.Semaphore(0)
    fake.script = lambda request: Script([[40], [41]], gate=gate)
    gateway = serve(app={"max_concurrent": 1})
    with client_of(gateway) as http:
        with http.stream(
            "POST", "/v1/completions", json={**BODY, "stream": True}, headers=auth("app")
        ) as one:
            lines = one.iter_lines()
            assert next(lines).startswith("data: ")
            reply = http.post("/v1/completions", json=BODY, headers=auth("app"))
            assert (reply.status_code, reply.headers["Retry-After"]) == (429, "1")
            gate.release()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        gate.release()
        assert http.post("/v1/completions", json=BODY, headers=auth("app")).status_code == 200
        reply = http.post("/v1/completions", json={**BODY, "n": 2}, headers=auth("app"))
        assert (reply.status_code, error_of(reply)["param"]) == (400, "n")


def test_the_target_sees_the_allowed_priority_mode_and_salt(
    serve: Callable[..., GatewayThread], fake: FakeTarget
) -> None:
    batch = {"priority": [-9, -1], "speculation": ["off"], "cache_salt": "'batch'"}
    with client_of(serve(batch=batch, app={"priority": [0, 5]})) as http:
        shown = {name: http.get("/server_info", headers=auth(name)).json() for name in ("batch", "app")}
        assert {name: info["speculation_mode"] for name, info in shown.items()} == {
            "batch": "off",
            "app": "auto",
        }
        http.post("/v1/completions", json={**BODY, "cache_salt": "mine"}, headers=auth("batch"))
        http.post("/v1/completions", json={**BODY, "priority": 5}, headers=auth("app"))
    first, second = fake.seen
    assert (first.priority, second.priority) == (-1, 5)
    assert (first.speculation.mode, second.speculation.mode) == (
        common_pb2.SPECULATION_MODE_OFF,
        common_pb2.SPECULATION_MODE_AUTO,
    )
    assert (first.tenant, second.tenant) == ("batch", "app")
    assert (first.cache_salt, second.cache_salt) == ("key:batch:mine", "")


def test_grpc_has_the_same_keys_limits_and_headers(serve: Callable[..., GatewayThread]) -> None:
    gateway = serve(app={"requests_per_minute": 3, "tokens_per_minute": 1000}, other={})
    with stub_of(gateway) as stub:
        call = complete(stub, "app")
        assert len(list(call)) >= 2
        headers = dict(call.initial_metadata())
        assert headers["x-ratelimit-remaining-requests"] == "2"
        with pytest.raises(grpc.RpcError) as denied:
            list(complete(stub, "app", priority=3))
        assert denied.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert error_from_rpc(denied.value).field == "priority"
        list(complete(stub, "app"))
        with pytest.raises(grpc.RpcError) as limited:
            list(complete(stub, "app"))
        assert limited.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_from_rpc(limited.value)
        assert error.reason == "rate_limit_exceeded"
        assert 0 < (error.retry_after_s or 0) <= 20
        assert list(complete(stub, "other")), "other keys are not limited"
        with pytest.raises(grpc.RpcError) as unknown:
            list(complete(stub, "nobody"))
        assert unknown.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_changed_file_takes_effect_without_a_restart(
    serve: Callable[..., GatewayThread], tmp_path: Path
) -> None:
    gateway = serve(app={})

    async def reload() -> bool:
        return gateway.server.core.ring.reload_if_changed()

    with client_of(gateway) as http:
        assert http.get("/v1/models", headers=auth("new")).status_code == 401
        write_keys(tmp_path / "keys.toml", new={})
        gateway.call(reload())
        assert http.get("/v1/models", headers=auth("new")).status_code == 200
        assert http.get("/v1/models", headers=auth("app")).status_code == 401
        (tmp_path / "keys.toml").write_text("[[keys")
        gateway.call(reload())
        assert http.get("/v1/models", headers=auth("new")).status_code == 200


def test_every_route_is_for_everybody_for_users_or_for_operators(
    serve: Callable[..., GatewayThread],
) -> None:
    """A new route must be added to `USER_PATHS`, or to `ADMIN_PATHS` if it is for operators."""
    gateway = serve(app={}, boss={"admin": True})
    paths = create_app(gateway.server.core).openapi()["paths"].keys()
    assert paths == USER_PATHS | ADMIN_PATHS | PUBLIC_PATHS
    with client_of(gateway) as http:
        for path in ADMIN_PATHS:
            reply = http.get(path, headers=auth("app"))
            assert (reply.status_code, error_of(reply)["code"]) == (403, "permission_denied")
            assert http.get(path, headers=auth("boss")).status_code == 200
            assert http.get(path).status_code == 401
        assert http.post("/flush_cache", headers=auth("app")).status_code == 403


@pytest.mark.parametrize("api", ["rest", "grpc"])
def test_a_key_aborts_only_its_own_requests(
    serve: Callable[..., GatewayThread], fake: FakeTarget, api: str
) -> None:
    fake.script = lambda request: Script([[40]], finish=False)
    gateway = serve(app={}, other={}, boss={"admin": True})

    def abort(name: str) -> int:
        if api == "rest":
            with client_of(gateway) as http:
                reply = http.post("/abort_request", json={"abort_all": True}, headers=auth(name))
            return int(reply.json()["aborted"])
        with stub_of(gateway) as stub:
            metadata = (("authorization", f"Bearer {key_of(name)}"),)
            return int(stub.Abort(gateway_pb2.AbortRequest(all=True), metadata=metadata).aborted)

    body = {"input_ids": [9], "stream": True}
    with client_of(gateway) as http:
        for aborter, aborted in (("app", 1), ("boss", 1)):
            with http.stream("POST", "/generate", json=body, headers=auth("app")) as running:
                lines = running.iter_lines()
                assert next(lines).startswith("data: ")
                assert abort("other") == 0
                assert abort(aborter) == aborted
                assert '"abort"' in "".join(lines)


def test_keys_of_flags_are_admin_unless_there_is_an_admin_key(
    make_gateway: MakeGateway, tmp_path: Path
) -> None:
    admin = tmp_path / "admin"
    admin.write_text(key_of("boss"))
    alone = make_gateway(api_key=(key_of("app"),))
    with_admin = make_gateway(api_key=(key_of("app"),), admin_api_key_file=admin)
    for gateway, name, status in ((alone, "app", 200), (with_admin, "app", 403), (with_admin, "boss", 200)):
        with client_of(gateway) as http:
            assert http.get("/status.json", headers=auth(name)).status_code == status
            assert http.post("/v1/completions", json=BODY, headers=auth(name)).status_code == 200


def test_metrics_name_the_key_and_count_its_tokens(serve: Callable[..., GatewayThread]) -> None:
    with client_of(serve(app={}, boss={"admin": True})) as http:
        http.post("/v1/completions", json=BODY, headers=auth("app"))
        text = http.get("/metrics", headers=auth("boss")).text
    for line in (
        'outrider_key_requests_total{key="app"} 1.0',
        'outrider_key_tokens_total{key="app",kind="prompt"} 2.0',
        'outrider_key_tokens_total{key="app",kind="generation"} 2.0',
        'outrider_key_sequences_active{key="app"} 0.0',
    ):
        assert line in text


def test_keys_appear_neither_in_ps_nor_in_logs_nor_in_metrics(
    fake: FakeTarget, tokenizer_dir: Path, tmp_path: Path
) -> None:
    file = write_keys(tmp_path / "keys.toml", app={"requests_per_minute": 1}, boss={"admin": True})
    port = free_port()
    settings = {"port": port, "target": fake.address, "tokenizer": tokenizer_dir, "log_level": "debug"}
    with process(**settings, api_keys_file=file) as child:
        wait_ready(child)
        command = Path(f"/proc/{child.pid}/cmdline").read_bytes()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as http:
            for _ in range(2):
                last = http.post("/v1/completions", json=BODY, headers=auth("app"))
            assert last.status_code == 429
            http.post("/v1/completions", json=BODY, headers=auth("stranger"))
            seen = http.get("/metrics", headers=auth("boss")).text
            seen += http.get("/status.json", headers=auth("boss")).text
        child.terminate()
        output, _ = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 0
    assert "key=app" in output
    for name in ("app", "boss", "stranger"):
        assert key_of(name) not in output + seen + command.decode()
