"""TLS, mTLS and the token between services, for every kind of call that services make to each other."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.connection.throwaway_ca import ThrowawayCa
from test_server import NAME, servicers

from outrider.services.draft.settings import DraftSettings
from outrider.services.gateway.target_client.client import TargetClient
from outrider.services.gateway.target_client.stream import ReaderLimits
from outrider.shared.base.errors import ConfigurationError
from outrider.shared.rpc import certificate_files
from outrider.shared.rpc.client import connect_aio, open_channel
from outrider.shared.rpc.direct import ClientStream, StreamEndedError
from outrider.shared.rpc.peer_security import (
    NO_SECURITY,
    PeerSecurity,
    load_security,
    use_in_this_process,
)
from outrider.shared.rpc.polling import PollWindow
from outrider.shared.rpc.server import aio_server, sync_server
from outrider.target.v1 import target_pb2, target_pb2_grpc

TOKEN = "0123456789abcdef-the-token"
WAIT_S = 10
GENERATE = target_pb2.SessionRequest(generate=target_pb2.GenerateRequest(request_id="one"))
Call = Callable[[str, PeerSecurity], str]


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> ThrowawayCa:
    return ThrowawayCa(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def mutual(ca: ThrowawayCa) -> PeerSecurity:
    """The security of a service with certificate, CA and token."""
    own = ca.issue("service")
    return replace(load_security(own.cert, own.key, ca.cert, None), token=TOKEN)


@pytest.fixture
def serve() -> Iterator[Callable[[PeerSecurity], str]]:
    servers = []

    def start(security: PeerSecurity, address: str = "127.0.0.1:0") -> str:
        server = sync_server(address, servicers(), [NAME], max_workers=2, security=security)
        server.start()
        servers.append(server)
        return server.address

    yield start
    for server in servers:
        server.stop(0)


def unary(address: str, security: PeerSecurity) -> str:
    with open_channel(address, security=security) as channel:
        return (
            target_pb2_grpc.TargetStub(channel).GetInfo(target_pb2.GetInfoRequest(), timeout=WAIT_S).model_id
        )


def direct(address: str, security: PeerSecurity) -> str:
    """Call through the low-latency stream that connects target and draft."""
    with open_channel(address, security=security) as channel:
        stream = ClientStream(channel, f"/{NAME}/Session", PollWindow())
        stream.send(GENERATE.SerializeToString())
        reply = target_pb2.SessionReply.FromString(stream.receive() or b"")
        return "toy" if reply.replies[0].request_id == "one" else "?"


def of_asyncio(address: str, security: PeerSecurity) -> str:
    """Call as the gateway does: a unary call, a server stream, and a stream that is written to."""

    async def run() -> str:
        async with connect_aio(address, security=security) as channel:
            stub = target_pb2_grpc.TargetStub(channel)
            info = await stub.GetInfo(target_pb2.GetInfoRequest(), timeout=WAIT_S)
            async for reply in stub.Generate(target_pb2.GenerateRequest(), timeout=WAIT_S):
                assert reply.request_id == ""
            session = stub.Session(timeout=WAIT_S)
            for _ in range(3):
                await session.write(GENERATE)
                answer = await session.read()
                assert answer.replies[0].request_id == "one"
            return str(info.model_id)

    return asyncio.run(run())


CALLS = pytest.mark.parametrize("call", [unary, direct, of_asyncio])


def code_of(call: Call, address: str, security: PeerSecurity) -> grpc.StatusCode:
    with pytest.raises((grpc.RpcError, StreamEndedError)) as caught:
        call(address, security)
    return caught.value.code()


@CALLS
def test_mutual_tls_with_a_token(
    serve: Callable[[PeerSecurity], str], mutual: PeerSecurity, ca: ThrowawayCa, call: Call
) -> None:
    address = serve(mutual)
    assert call(address, mutual) == "toy"
    assert code_of(call, address, replace(mutual, token=f"{TOKEN}?")) is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(call, address, replace(mutual, token="")) is grpc.StatusCode.UNAUTHENTICATED


@CALLS
def test_a_token_on_loopback_without_tls(serve: Callable[[PeerSecurity], str], call: Call) -> None:
    address = serve(PeerSecurity(token=TOKEN))
    assert call(address, PeerSecurity(token=TOKEN)) == "toy"
    assert code_of(call, address, PeerSecurity(token=f"{TOKEN}?")) is grpc.StatusCode.UNAUTHENTICATED
    assert code_of(call, address, NO_SECURITY) is grpc.StatusCode.UNAUTHENTICATED


def test_strangers_do_not_get_through_the_handshake(
    serve: Callable[[PeerSecurity], str], mutual: PeerSecurity, ca: ThrowawayCa, tmp_path: Path
) -> None:
    address = serve(mutual)
    other = ThrowawayCa(tmp_path / "other")
    stranger = other.issue("stranger")
    for name, security in (
        ("no TLS", PeerSecurity(token=TOKEN)),
        ("no certificate", PeerSecurity(ca=ca.cert.read_bytes(), token=TOKEN)),
        ("the certificate of another CA", load_security(stranger.cert, stranger.key, ca.cert, None)),
        ("trusts another CA only", replace(mutual, ca=other.cert.read_bytes())),
    ):
        assert code_of(unary, address, security) is grpc.StatusCode.UNAVAILABLE, name


def test_tls_without_client_certificates(
    serve: Callable[[PeerSecurity], str], mutual: PeerSecurity, ca: ThrowawayCa
) -> None:
    address = serve(replace(mutual, ca=b""))
    client = PeerSecurity(ca=ca.cert.read_bytes(), token=TOKEN)
    assert unary(address, client) == direct(address, client) == "toy"


def test_health_needs_no_token_but_reflection_does(serve: Callable[[PeerSecurity], str]) -> None:
    address = serve(PeerSecurity(token=TOKEN))
    with open_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        assert check(health_pb2.HealthCheckRequest(service=NAME), timeout=WAIT_S).status
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            list(reflection(iter([b""]), timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_unix_sockets_need_neither(serve: Callable[..., str], mutual: PeerSecurity, tmp_path: Path) -> None:
    address = serve(mutual, f"unix:{tmp_path / 'socket'}")
    assert unary(address, NO_SECURITY) == unary(address, mutual) == "toy"


def test_every_handshake_uses_the_files_as_they_are_then(
    serve: Callable[[PeerSecurity], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files are replaced, one after the other. In between, key and certificate do not belong together."""
    monkeypatch.setattr(certificate_files, "CHECK_S", 0.0)
    old, new = ThrowawayCa(tmp_path / "old"), ThrowawayCa(tmp_path / "new")
    mine = {name: tmp_path / name for name in ("cert", "key", "ca")}

    def install(*names: str) -> None:
        for name in names:
            os.replace(made[name], mine[name])

    def files(authority: ThrowawayCa) -> dict[str, Path]:
        own = authority.issue("server")
        ca = own.cert.with_name("copy.pem")
        ca.write_bytes(authority.cert.read_bytes())
        return {"cert": own.cert, "key": own.key, "ca": ca}

    def client(authority: ThrowawayCa) -> PeerSecurity:
        own = authority.issue("client")
        return load_security(own.cert, own.key, authority.cert, None)

    made = files(old)
    install("cert", "key", "ca")
    address = serve(load_security(mine["cert"], mine["key"], mine["ca"], None))
    before, after = client(old), client(new)
    assert unary(address, before) == "toy"
    assert code_of(unary, address, after) is grpc.StatusCode.UNAVAILABLE
    made = files(new)
    install("cert")
    assert unary(address, before) == "toy"
    install("key", "ca")
    assert unary(address, after) == "toy"
    assert code_of(unary, address, before) is grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def renewable(ca: ThrowawayCa, tmp_path: Path) -> Iterator[Callable[[ThrowawayCa], None]]:
    """Give this process certificates of another CA, from files. Return a function that renews them."""
    mine = {name: tmp_path / name for name in ("cert", "key", "ca")}

    def install(authority: ThrowawayCa) -> None:
        own = authority.issue("client")
        for name, source in (("ca", authority.cert), ("key", own.key), ("cert", own.cert)):
            copy = tmp_path / "copy"
            copy.write_bytes(source.read_bytes())
            copy.chmod(0o600)
            os.replace(copy, mine[name])

    install(ThrowawayCa(tmp_path / "expired"))
    use_in_this_process(load_security(mine["cert"], mine["key"], mine["ca"], None))
    yield install
    use_in_this_process(NO_SECURITY)


@CALLS
def test_new_channels_use_renewed_certificates(
    serve: Callable[[PeerSecurity], str],
    mutual: PeerSecurity,
    ca: ThrowawayCa,
    renewable: Callable[[ThrowawayCa], None],
    tmp_path: Path,
    call: Callable[[str, PeerSecurity | None], str],
) -> None:
    address = serve(replace(mutual, token=""))
    with pytest.raises((grpc.RpcError, StreamEndedError)):
        call(address, None)
    renewable(ca)
    assert call(address, None) == "toy"
    (tmp_path / "key").write_text("half of a key")  # the last valid files stay in use
    assert call(address, None) == "toy"


def test_a_gateway_connects_with_renewed_certificates(
    serve: Callable[[PeerSecurity], str],
    mutual: PeerSecurity,
    ca: ThrowawayCa,
    renewable: Callable[[ThrowawayCa], None],
) -> None:
    address = serve(replace(mutual, token=""))

    async def run() -> None:
        client = TargetClient(address, ReaderLimits(1 << 20, WAIT_S))
        await client.start()
        try:
            async with asyncio.timeout(WAIT_S):
                while client._refusal == "":  # until the first handshake has failed
                    await asyncio.sleep(0.01)
            renewable(ca)
            async with asyncio.timeout(WAIT_S):
                assert client._channel is not None
                while client._channel.get_state() is not grpc.ChannelConnectivity.READY:
                    await asyncio.sleep(0.01)
        finally:
            await client.close()

    asyncio.run(run())


def test_certificates_are_looked_at_once_a_second(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    now = [0.0]

    def read() -> certificate_files.Certificates:
        if (text := file.read_text()) == "broken":
            raise ConfigurationError("broken")
        return certificate_files.Certificates(text.encode(), b"")

    files = certificate_files.CertificateFiles([file], read, lambda: now[0])
    seen = []
    for text in ("22", "broken", "4444", ""):
        if text:
            file.write_text(text)
        assert files.changed() is None
        now[0] += certificate_files.CHECK_S
        seen.append(found.certificate if (found := files.changed()) else None)
    assert seen == [b"22", None, b"4444", None]


class AioTarget(target_pb2_grpc.TargetServicer):
    async def GetInfo(self, request, context):
        return target_pb2.GetInfoReply(model_id="toy")


def test_asyncio_servers_check_the_token_too(mutual: PeerSecurity) -> None:
    async def run() -> tuple[str, grpc.StatusCode]:
        added = [(target_pb2_grpc.add_TargetServicer_to_server, AioTarget())]
        server = aio_server("127.0.0.1:0", added, [NAME], security=mutual)
        await server.start()
        try:
            good = await asyncio.to_thread(unary, server.address, mutual)
            bad = await asyncio.to_thread(code_of, unary, server.address, replace(mutual, token="x" * 20))
        finally:
            await server.stop(0)
        return good, bad

    assert asyncio.run(run()) == ("toy", grpc.StatusCode.UNAUTHENTICATED)


def test_an_address_for_other_hosts_needs_tls_and_a_token(ca: ThrowawayCa, tmp_path: Path) -> None:
    own = ca.issue("listener")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    files = {"peer_tls_cert": own.cert, "peer_tls_key": own.key, "peer_token_file": token}
    DraftSettings(listen="0.0.0.0:7002", **files).check_listen("0.0.0.0:7002")
    for missing in ({"peer_tls_cert", "peer_tls_key"}, {"peer_token_file"}):
        settings = DraftSettings(**{name: file for name, file in files.items() if name not in missing})
        with pytest.raises(ConfigurationError, match=r"--peer-tls-cert.*--insecure"):
            settings.check_listen("0.0.0.0:7002")
    DraftSettings(insecure=True).check_listen("0.0.0.0:7002")


def test_files_that_cannot_be_used_are_named(ca: ThrowawayCa, tmp_path: Path) -> None:
    own, other = ca.issue("own"), ca.issue("other")
    text = tmp_path / "text"
    text.write_text("no certificate, but long enough for a token")
    short = tmp_path / "short"
    short.write_text("short")
    for file in (text, short):
        file.chmod(0o600)
    own_open = tmp_path / "open.key"
    own_open.write_bytes(own.key.read_bytes())
    own_open.chmod(0o644)
    open_token = tmp_path / "open"
    open_token.write_text(TOKEN)
    open_token.chmod(0o604)
    missing = tmp_path / "missing"
    for files, named in (
        ((own.cert, None, None, None), "peer_tls_key: set peer_tls_cert and peer_tls_key together"),
        ((None, own.key, None, None), "peer_tls_cert: set"),
        ((own.cert, other.key, None, None), "peer_tls_cert: .* are not a PEM certificate and its key"),
        ((own.cert, own_open, None, None), "peer_tls_key: other users .* chmod"),
        ((missing, own.key, None, None), "peer_tls_cert: .* cannot be read: No such file"),
        ((None, None, text, None), "peer_tls_ca: .* no PEM certificates"),
        ((None, None, None, short), "peer_token_file: .* at least 16"),
        ((None, None, None, open_token), "peer_token_file: other users"),
    ):
        with pytest.raises(ConfigurationError, match=named) as caught:
            load_security(*files)
        assert caught.value.field == named.partition(":")[0]


def test_secrets_are_not_printed(mutual: PeerSecurity) -> None:
    assert not re.search(r"BEGIN|token=|0123456789", repr(mutual))
