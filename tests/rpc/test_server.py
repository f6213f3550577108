"""Common features of all gRPC servers: health, reflection, message limits, clean stops, address errors."""

from __future__ import annotations

import os
import resource
import socket
import stat
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.shared.base.errors import ConfigurationError
from outrider.shared.rpc.address import check_address, check_listen_address
from outrider.shared.rpc.client import connect_aio, open_channel
from outrider.shared.rpc.options import connection_limit
from outrider.shared.rpc.server import PatientHealth, aio_server, sync_server
from outrider.target.v1 import target_pb2, target_pb2_grpc

NAME = "outrider.target.v1.Target"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Target(target_pb2_grpc.TargetServicer):
    def GetInfo(self, request, context):
        return target_pb2.GetInfoReply(model_id="toy")

    def Session(self, request_iterator, context):
        for request in request_iterator:
            yield target_pb2.SessionReply(
                replies=[target_pb2.GenerateReply(request_id=request.generate.request_id)]
            )

    def Generate(self, request, context):
        yield target_pb2.GenerateReply(request_id="x" * len(request.prompt_ids))

    def GetStats(self, request, context):
        return target_pb2.GetStatsReply(prometheus_text="x" * 70_000_000)

    def GetTensor(self, request, context):
        yield target_pb2.GetTensorReply()


def servicers() -> list:
    return [(target_pb2_grpc.add_TargetServicer_to_server, Target())]


@pytest.fixture
def server():
    built = sync_server("127.0.0.1:0", servicers(), [NAME], max_workers=2)
    built.start()
    yield built
    built.stop(0)


def check(channel: grpc.Channel, service: str) -> int:
    return (
        health_pb2_grpc.HealthStub(channel)
        .Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        .status
    )


def test_health_follows_set_serving_for_every_name(server) -> None:
    with open_channel(server.address) as channel:
        assert [check(channel, name) for name in ("", NAME)] == [NOT_SERVING, NOT_SERVING]
        server.set_serving(True)
        assert [check(channel, name) for name in ("", NAME)] == [SERVING, SERVING]


def test_watchers_see_the_change_and_occupy_no_worker(server) -> None:
    with open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=20) for _ in range(6)]
        assert [next(watch).status for watch in watches] == [NOT_SERVING] * 6
        # The server has two workers and six watchers. A call still gets through.
        assert (
            target_pb2_grpc.TargetStub(channel).GetInfo(target_pb2.GetInfoRequest(), timeout=10).model_id
            == "toy"
        )
        server.set_serving(True)
        assert [next(watch).status for watch in watches] == [SERVING] * 6
        for watch in watches:
            watch.cancel()


class Call:
    """A call's context that keeps the callbacks for the end of the call."""

    def __init__(self) -> None:
        self.ended: list = []

    def add_callback(self, callback) -> bool:
        self.ended.append(callback)
        return True


def test_a_watcher_that_leaves_during_a_notification_does_not_block_the_server() -> None:
    """gRPC completes sends and ends calls on one thread.

    If ending a call waited for a send, both would deadlock.
    """
    servicer, leaving = PatientHealth(), Call()
    replies = []

    def reply_slowly(reply) -> None:
        replies.append(reply)
        serving = threading.Thread(target=lambda: [callback() for callback in leaving.ended], daemon=True)
        serving.start()
        serving.join(5)
        assert not serving.is_alive(), "the server's thread waits for the health service"

    request = health_pb2.HealthCheckRequest(service=NAME)
    servicer.Watch(request, leaving, lambda reply: None)
    servicer.Watch(request, Call(), reply_slowly)
    servicer.set(NAME, SERVING)
    assert [reply.status for reply in replies if reply is not None][-1] == SERVING


def test_reflection_lists_the_services(server) -> None:
    with open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        replies = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        names = {service.name for service in next(replies).list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


def test_messages_may_be_large_but_not_unlimited(server) -> None:
    with open_channel(server.address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)
        large = target_pb2.GenerateRequest(prompt_ids=range(3_000_000))
        assert len(next(stub.Generate(large, timeout=30)).request_id) == 3_000_000
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetStats(target_pb2.GetStatsRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_stop_lets_a_stream_finish_within_the_grace_and_refuses_new_calls() -> None:
    server = sync_server("127.0.0.1:0", servicers(), [NAME], max_workers=4)
    server.start()
    requests: list[target_pb2.SessionRequest] = [
        target_pb2.SessionRequest(generate=target_pb2.GenerateRequest(request_id="1"))
    ]
    stopping = []

    def feed():
        yield requests[0]
        # By now the first reply has been read and the stop has begun.
        while not stopping:
            started.wait()
        yield target_pb2.SessionRequest(generate=target_pb2.GenerateRequest(request_id="2"))

    import threading

    started = threading.Event()
    with open_channel(server.address) as channel:
        replies = target_pb2_grpc.TargetStub(channel).Session(feed(), timeout=20)
        assert next(replies).replies[0].request_id == "1"
        stopper = threading.Thread(target=server.stop, args=(10,))
        stopper.start()
        stopping.append(True)
        started.set()
        assert next(replies).replies[0].request_id == "2"
        assert list(replies) == []
        stopper.join(10)
        assert not stopper.is_alive()
        with pytest.raises(grpc.RpcError) as caught:
            target_pb2_grpc.TargetStub(channel).GetInfo(target_pb2.GetInfoRequest(), timeout=1)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_the_asyncio_server_offers_the_same(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s.sock"
    server = aio_server(address, servicers(), [NAME])
    await server.start()
    try:
        async with connect_aio(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (
                await health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=10)
            ).status == NOT_SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(service=""), timeout=10)
            assert (await watch.read()).status == NOT_SERVING
            await server.set_serving(True)
            assert (await watch.read()).status == SERVING
            watch.cancel()
            reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
            )
            assert NAME in {
                service.name for service in (await reflected.read()).list_services_response.service
            }
    finally:
        await server.stop(0)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o177])
def test_a_unix_socket_is_accessible_to_its_user_only(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        server = sync_server(f"unix:{tmp_path}/s.sock", servicers(), [NAME])
        assert os.umask(mask) == mask, "the process's own umask is restored"
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o600
    server.stop(0)


def test_a_port_in_use_is_a_configuration_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=address):
            sync_server(address, servicers(), [NAME])


@pytest.mark.parametrize(
    "address",
    ["", "localhost", ":7001", "host:port", "host:70000", "unix:relative.sock", "unix:/" + "x" * 120],
)
def test_a_malformed_address_names_its_setting(address: str) -> None:
    with pytest.raises(ConfigurationError, match="listen") as caught:
        check_address(address, "listen")
    assert caught.value.field == "listen"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/a.sock"])
def test_local_addresses_may_be_listened_on(address: str) -> None:
    assert check_listen_address(address, "listen", allow_remote=False) == address


@pytest.mark.parametrize("address", ["0.0.0.0:7001", "[::]:7001", "10.0.0.3:7001", "example.org:7001"])
def test_addresses_reachable_from_other_hosts_need_an_explicit_flag(address: str) -> None:
    with pytest.raises(ConfigurationError, match="--insecure"):
        check_listen_address(address, "listen", allow_remote=False)
    assert check_listen_address(address, "listen", allow_remote=True) == address


def test_a_server_accepts_a_limited_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that send nothing then leave file descriptors for the rest of the process."""
    monkeypatch.setattr("outrider.shared.rpc.options.connection_limit", lambda: 4)
    server = sync_server("127.0.0.1:0", servicers(), [NAME], max_workers=2)
    server.start()
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(8)]
    assert [one.recv(1) for one in silent[4:]] == [b""] * 4
    for one in silent:
        one.close()
    server.stop(0)


def test_the_number_of_connections_depends_on_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for soft, connections in ((1024, 256), (resource.RLIM_INFINITY, 65_536), (10**9, 65_536)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connection_limit() == connections
