"""TLS and client certificates at the front, and TLS with a token towards the target."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from fake_target import TARGET_SERVICE, FakeTarget
from gateway_thread import GatewayThread, free_port
from support.connection.throwaway_ca import Certificate, ThrowawayCa
from test_process import TIMEOUT_S, process, wait_ready
from tokenizers import Tokenizer
from typer.testing import CliRunner, Result

from outrider.bench.load.lone import LoneConnection
from outrider.bench.load.server import find_server
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.services.cli.commands import app
from outrider.services.clients.rest import RestClient
from outrider.services.gateway.settings import GatewaySettings
from outrider.services.stack.liveness import service_probes
from outrider.services.stack.options import StackOptions
from outrider.services.stack.service_checks import check_gateway_flags, gateway_context
from outrider.services.tune.live import LiveClient
from outrider.shared.base.errors import ConfigurationError, UnavailableError
from outrider.shared.rpc.peer_security import load_security
from outrider.shared.rpc.server import sync_server
from outrider.shared.spec.tree import NO_DRAFT
from outrider.target.v1 import target_pb2_grpc

TOKEN = "0123456789abcdef-the-token"
BODY = {"prompt": [9, 9], "max_tokens": 2}


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> ThrowawayCa:
    return ThrowawayCa(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def front(ca: ThrowawayCa) -> Certificate:
    return ca.issue("front")


def https(gateway: GatewayThread, ca: ThrowawayCa, client: Certificate | None = None) -> httpx.Client:
    context = ssl.create_default_context(cafile=ca.cert)
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return httpx.Client(
        base_url=f"https://127.0.0.1:{gateway.server.port}",
        verify=context,
        timeout=TIMEOUT_S,
        trust_env=False,
    )


def list_models(gateway: GatewayThread, credentials: grpc.ChannelCredentials) -> int:
    with grpc.secure_channel(gateway.stack.grpc_address, credentials) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        return len(stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=TIMEOUT_S).models)


def test_rest_and_grpc_speak_only_tls(
    make_gateway: Callable[..., GatewayThread], ca: ThrowawayCa, front: Certificate
) -> None:
    gateway = make_gateway(tls_cert=front.cert, tls_key=front.key)
    with https(gateway, ca) as http:
        assert http.post("/v1/completions", json=BODY).status_code == 200
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
    assert list_models(gateway, grpc.ssl_channel_credentials(ca.cert.read_bytes())) == 1
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{gateway.server.port}/health", timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError), grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        gateway_pb2_grpc.InferenceStub(channel).ListModels(gateway_pb2.ListModelsRequest(), timeout=TIMEOUT_S)


def test_clients_need_a_certificate_if_the_gateway_has_a_ca(
    make_gateway: Callable[..., GatewayThread], ca: ThrowawayCa, front: Certificate
) -> None:
    gateway = make_gateway(tls_cert=front.cert, tls_key=front.key, tls_ca=ca.cert)
    client = ca.issue("client")
    with https(gateway, ca, client) as http:
        assert http.get("/health").status_code == 200
    with https(gateway, ca) as http, pytest.raises(httpx.TransportError):
        http.get("/health")
    root = ca.cert.read_bytes()
    trusted = grpc.ssl_channel_credentials(root, client.key.read_bytes(), client.cert.read_bytes())
    assert list_models(gateway, trusted) == 1
    with pytest.raises(grpc.RpcError):
        list_models(gateway, grpc.ssl_channel_credentials(root))


def test_the_gateway_reaches_its_target_by_mutual_tls_with_a_token(
    tokenizer: Tokenizer, tokenizer_dir: Path, ca: ThrowawayCa, tmp_path: Path
) -> None:
    own, token = ca.issue("gateway"), tmp_path / "token"
    token.touch(0o600)
    token.write_text(TOKEN)
    target = FakeTarget(tokenizer.get_vocab_size())
    peer = ca.issue("target")
    server = sync_server(
        "127.0.0.1:0",
        [(target_pb2_grpc.add_TargetServicer_to_server, target)],
        [TARGET_SERVICE],
        max_workers=4,
        security=load_security(peer.cert, peer.key, ca.cert, token),
    )
    server.start()
    server.set_serving(True)
    port = free_port()
    files = {"peer_tls_cert": own.cert, "peer_tls_key": own.key, "peer_tls_ca": ca.cert}
    settings = {"port": port, "target": server.address, "tokenizer": tokenizer_dir}
    try:
        with process(**settings, **files, peer_token_file=token) as child:
            wait_ready(child)
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY, timeout=TIMEOUT_S)
            assert reply.status_code == 200
            child.terminate()
            output, _ = child.communicate(timeout=TIMEOUT_S)
        assert child.returncode == 0
        assert TOKEN not in output
    finally:
        target.stop()
        server.stop(0)


def test_settings_that_make_no_sense_are_refused(ca: ThrowawayCa, front: Certificate) -> None:
    with pytest.raises(ConfigurationError, match="tls_key: set tls_cert and tls_key"):
        GatewaySettings(tls_cert=front.cert).check()
    with pytest.raises(ConfigurationError, match="tls_ca: set tls_cert"):
        GatewaySettings(tls_ca=ca.cert).check()


def test_up_checks_a_gateway_that_needs_certificates_with_its_own(
    make_gateway: Callable[..., GatewayThread], ca: ThrowawayCa, front: Certificate, tmp_path: Path
) -> None:
    files = {"tls_cert": front.cert, "tls_key": front.key, "tls_ca": ca.cert}
    options = StackOptions(gateway_settings=files)
    check_gateway_flags(options)
    gateway = make_gateway(**files)
    verify = gateway_context(options)
    with ExitStack() as cleanup:
        url = f"https://127.0.0.1:{gateway.server.port}"
        probes = service_probes(url, "127.0.0.1:1", None, cleanup, verify)
        assert probes["gateway"]()
        assert not service_probes(url, "127.0.0.1:1", None, cleanup)["gateway"]()
    stranger = ThrowawayCa(tmp_path / "stranger")
    with pytest.raises(ConfigurationError, match="does not accept") as caught:
        check_gateway_flags(StackOptions(gateway_settings={**files, "tls_ca": stranger.cert}))
    assert caught.value.field == "tls_ca"


def test_a_health_check_in_the_container_uses_the_certificate_of_the_gateway(
    make_gateway: Callable[..., GatewayThread],
    ca: ThrowawayCa,
    front: Certificate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = make_gateway(tls_cert=front.cert, tls_key=front.key, tls_ca=ca.cert)
    command = ["health", "--own-tls", "--url", f"http://127.0.0.1:{gateway.server.port}"]
    assert CliRunner().invoke(app, command).exit_code == 1  # without the variables, over HTTP
    for name, file in (("CERT", front.cert), ("KEY", front.key), ("CA", ca.cert)):
        monkeypatch.setenv(f"OUTRIDER_GATEWAY_TLS_{name}", str(file))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "/ready 200" in result.output
    monkeypatch.setenv("OUTRIDER_GATEWAY_TLS_CERT", "")
    assert CliRunner().invoke(app, command).exit_code == 1


def test_commands_trust_the_authorities_of_ssl_cert_file_and_dir(
    make_gateway: Callable[..., GatewayThread],
    ca: ThrowawayCa,
    front: Certificate,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    gateway = make_gateway(tls_cert=front.cert, tls_key=front.key)
    gateway.wait_ready()
    url = f"https://127.0.0.1:{gateway.server.port}"
    commands = (
        ["health", "--url", url],
        ["generate", "--raw", "--max-tokens", "2", "--url", url, "hello"],
        ["top", "--once", "--json", "--url", url],
    )

    def run(command: list[str]) -> Result:
        return CliRunner().invoke(app, command)

    def ask() -> None:
        with RestClient(url) as client:
            live = LiveClient(url, client.model)
            load = LoneConnection(url, {}, TIMEOUT_S)
            body = json.dumps({**BODY, "model": client.model}).encode()
            assert load.post("/v1/completions", body).status == 200
            load.close()
            assert find_server(url, None).model == client.model
            (answer,) = live.run([[9, 9]], NO_DRAFT, streams=1, tokens=2).answers
            assert len(answer.token_ids) == 2

    for command in commands:
        error = run(command).exception
        assert isinstance(error, UnavailableError)
        assert f"The certificate of {url} is not accepted" in error.message
        assert "SSL_CERT_FILE" in error.message
    with pytest.raises(UnavailableError, match="SSL_CERT_FILE"):
        find_server(url, None)
    monkeypatch.setenv("SSL_CERT_FILE", str(ca.cert))
    for command in commands:
        result = run(command)
        assert result.exit_code == 0, result.output or result.exception
    ask()
    monkeypatch.delenv("SSL_CERT_FILE")
    # OpenSSL finds an authority in a folder by the hash of its name.
    hashed = ["openssl", "x509", "-noout", "-hash", "-in", str(ca.cert)]
    digest = subprocess.run(hashed, check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / f"{digest}.0").symlink_to(ca.cert)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    ask()


def test_commands_say_why_tls_fails(
    make_gateway: Callable[..., GatewayThread],
    ca: ThrowawayCa,
    front: Certificate,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca.cert))

    def failure(url: str) -> str:
        with RestClient(url) as client, pytest.raises(UnavailableError) as caught:
            client.get_json("/health")
        return caught.value.message

    mutual = make_gateway(tls_cert=front.cert, tls_key=front.key, tls_ca=ca.cert)
    assert "requires client certificates" in failure(f"https://127.0.0.1:{mutual.server.port}")
    other = make_gateway(host="127.0.0.2", tls_cert=front.cert, tls_key=front.key)
    assert "that the certificate contains" in failure(f"https://127.0.0.2:{other.server.port}")
    plain = make_gateway()
    assert "Does the server use TLS" in failure(f"https://127.0.0.1:{plain.server.port}")
    for content in (None, "no certificate"):
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        if content is not None:
            (tmp_path / "ca.pem").write_text(content)
        with pytest.raises(ConfigurationError, match=r"SSL_CERT_FILE=.*ca\.pem cannot be used"):
            RestClient("https://127.0.0.1:1")
    with RestClient(plain.stack.base_url) as client:  # without TLS, the file is not needed
        assert client.status("/health")[0] == 200


def test_a_renewed_certificate_is_used_without_a_restart(
    make_gateway: Callable[..., GatewayThread], ca: ThrowawayCa, tmp_path: Path
) -> None:
    mine = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")

    def install(authority: ThrowawayCa, name: str) -> None:
        made = authority.issue(name)
        for new, old in ((made.key, mine.key), (made.cert, mine.cert)):
            os.replace(new, old)

    def trusts(authority: ThrowawayCa) -> bool:
        try:
            with https(gateway, authority) as http:
                http.get("/health")
            list_models(gateway, grpc.ssl_channel_credentials(authority.cert.read_bytes()))
        except (httpx.TransportError, grpc.RpcError):
            return False
        return True

    install(ca, "first")
    gateway = make_gateway(tls_cert=mine.cert, tls_key=mine.key)
    other = ThrowawayCa(tmp_path / "other")
    assert trusts(ca)
    assert not trusts(other)
    install(other, "second")
    ends = time.monotonic() + TIMEOUT_S
    while not trusts(other):
        assert time.monotonic() < ends
    assert not trusts(ca)
