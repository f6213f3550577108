"""The target service over real gRPC: streams, multiplexing, cancels, errors, weights, health and drain."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from support.models.toys import make_toy_target

from outrider.common.v1 import common_pb2
from outrider.services.target.api.servicer import SERVICE_NAME, TargetServicer
from outrider.services.target.app import Target
from outrider.services.target.settings import TargetSettings
from outrider.shared.rpc.client import open_channel
from outrider.shared.rpc.server import aio_server
from outrider.shared.rpc.tensors import join_tensors
from outrider.target.v1 import target_pb2, target_pb2_grpc

VOCAB = 64
PROMPT = [5, 9, 2, 33, 7]
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_target(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, seed=3)


class Service:
    """A target in this process, with its asyncio server on a separate thread."""

    def __init__(self, settings: TargetSettings) -> None:
        self.target = Target(settings)
        self.address = settings.listen
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(TIMEOUT_S)

    async def _start(self) -> object:
        servicer = TargetServicer()
        server = aio_server(
            self.address, [(target_pb2_grpc.add_TargetServicer_to_server, servicer)], [SERVICE_NAME]
        )
        await server.start()
        servicer.serve(self.target.serving)
        await server.set_serving(True)
        return server

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(0.1), self._loop).result(TIMEOUT_S)  # type: ignore[attr-defined]
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.target.shutdown()


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    listen = f"unix:{tmp_path_factory.mktemp('s')}/t.sock"
    service = Service(
        TargetSettings.load(
            {"model": model, "listen": listen, "threads": 1, "kv_tokens": 4096, "max_queued_requests": 32}
        )
    )
    yield service
    service.stop()


@pytest.fixture
def stub(service: Service) -> Iterator[target_pb2_grpc.TargetStub]:
    with open_channel(service.address) as channel:
        yield target_pb2_grpc.TargetStub(channel)
    assert pages_held(service) == 0


def pages_held(service: Service) -> int:
    """Return the number of pages in use once the engine is idle."""
    finished = threading.Event()
    for _ in range(400):
        if service.target.engine.num_live == 0:
            break
        finished.wait(0.01)
    return service.target.engine.stats().pages_held


def request(request_id: str = "a", **fields: object) -> target_pb2.GenerateRequest:
    options = {
        "prompt_ids": PROMPT,
        "max_new_tokens": 20,
        "sampling": common_pb2.SamplingOptions(temperature=0.0),
        **fields,
    }
    return target_pb2.GenerateRequest(request_id=request_id, **options)  # type: ignore[arg-type]


def generate(stub: target_pb2_grpc.TargetStub, **fields: object) -> tuple[list[int], target_pb2.Finish]:
    replies = list(stub.Generate(request(**fields), timeout=TIMEOUT_S))
    return [token for reply in replies for token in reply.delta.token_ids], replies[-1].finish


def generate_for_ever(stub: target_pb2_grpc.TargetStub) -> None:
    while True:
        generate(stub, max_new_tokens=1)


def test_generate_streams_tokens_and_finishes(stub: target_pb2_grpc.TargetStub) -> None:
    tokens, finish = generate(stub)
    assert len(tokens) == 20
    assert finish.reason == common_pb2.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (5, 20)
    assert not finish.HasField("matched_token")
    assert finish.speculation.rounds == 19
    assert generate(stub, stop_token_ids=[tokens[3]])[1].matched_token == tokens[3]


def test_one_session_carries_many_requests(stub: target_pb2_grpc.TargetStub) -> None:
    expected, _finish = generate(stub)
    outbox: queue.SimpleQueue[target_pb2.SessionRequest | None] = queue.SimpleQueue()
    # The request id is reused at once, because the first request could have ended later on.
    for request_id in ("0", "0", *map(str, range(1, 8))):
        outbox.put(target_pb2.SessionRequest(generate=request(request_id)))
    outbox.put(target_pb2.SessionRequest(generate=request("bad", max_new_tokens=0)))
    outbox.put(None)
    tokens: dict[str, list[int]] = {}
    ended: dict[str, list[str]] = {}
    messages = 0
    for reply in stub.Session(iter(outbox.get, None), timeout=TIMEOUT_S):
        messages += 1
        for one in reply.replies:
            tokens.setdefault(one.request_id, []).extend(one.delta.token_ids)
            if not one.HasField("delta"):
                ended.setdefault(one.request_id, []).append(str(one.WhichOneof("event")))
                if one.HasField("error"):
                    assert one.error.status == 400
                    assert one.error.field == ("max_new_tokens" if one.request_id == "bad" else "request_id")
    assert all(tokens[str(index)] == expected for index in range(8))
    assert ended["bad"] == ["error"]
    assert sorted(ended["0"]) == ["error", "finish"], (
        "reusing a request id is refused, and the first one continues"
    )
    assert messages < 8 * 20, "replies are batched"


def test_the_end_of_a_session_cancels_its_requests(
    service: Service, stub: target_pb2_grpc.TargetStub
) -> None:
    outbox: queue.SimpleQueue[target_pb2.SessionRequest | None] = queue.SimpleQueue()
    outbox.put(target_pb2.SessionRequest(generate=request("a", max_new_tokens=1000)))
    call = stub.Session(iter(outbox.get, None), timeout=TIMEOUT_S)
    next(call)
    assert service.target.engine.stats().pages_held > 0
    call.cancel()
    outbox.put(None)
    assert pages_held(service) == 0
    assert service.target.engine.stats().generated_tokens < 10_000


def test_a_session_cancels_pauses_and_resumes(stub: target_pb2_grpc.TargetStub) -> None:
    outbox: queue.SimpleQueue[target_pb2.SessionRequest | None] = queue.SimpleQueue()
    outbox.put(target_pb2.SessionRequest(generate=request("a", max_new_tokens=1000)))
    outbox.put(target_pb2.SessionRequest(generate=request("b", max_new_tokens=1000)))
    call = stub.Session(iter(outbox.get, None), timeout=TIMEOUT_S)
    started: set[str] = set()
    while started != {"a", "b"}:
        started |= {one.request_id for one in next(call).replies}
    outbox.put(target_pb2.SessionRequest(pause=target_pb2.Pause(request_id="a")))
    outbox.put(target_pb2.SessionRequest(cancel=target_pb2.Cancel(request_id="b", keep_tokens=1)))
    finishes = {}
    for reply in call:
        for one in reply.replies:
            if one.HasField("finish"):
                finishes[one.request_id] = one.finish
                if one.request_id == "b":
                    outbox.put(target_pb2.SessionRequest(resume=target_pb2.Resume(request_id="a")))
                    outbox.put(target_pb2.SessionRequest(cancel=target_pb2.Cancel(request_id="a")))
                    outbox.put(None)
    assert finishes["b"].usage.completion_tokens == 1
    assert finishes["b"].reason == common_pb2.FINISH_REASON_STOP
    assert finishes["a"].reason == common_pb2.FINISH_REASON_CANCELLED


def test_cancelling_a_call_frees_its_pages(service: Service, stub: target_pb2_grpc.TargetStub) -> None:
    call = stub.Generate(request(max_new_tokens=1000), timeout=TIMEOUT_S)
    next(call)
    call.cancel()
    assert pages_held(service) == 0


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"prompt_ids": []}, "prompt_ids", "invalid_value"),
        ({"prompt_ids": [VOCAB]}, "prompt_ids", "invalid_value"),
        ({"prompt_ids": [1] * 1025}, "prompt_ids", "context_length_exceeded"),
        ({"sampling": common_pb2.SamplingOptions(top_p=2.0)}, "top_p", "invalid_value"),
        (
            {"speculation": common_pb2.SpeculationOptions(max_nodes=0)},
            "speculation.max_nodes",
            "invalid_value",
        ),
        ({"speculation": common_pb2.SpeculationOptions(depth=99)}, "speculation.depth", "invalid_value"),
    ],
)
def test_bad_fields_are_named(
    stub: target_pb2_grpc.TargetStub, fields: dict[str, object], field: str, reason: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(stub, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = {detail.TypeName(): detail for detail in rpc_status.from_call(refused.value).details}
    bad_request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    details["google.rpc.BadRequest"].Unpack(bad_request)
    details["google.rpc.ErrorInfo"].Unpack(info)
    assert bad_request.field_violations[0].field == field
    assert info.reason.lower() == reason


def test_the_callers_deadline_ends_the_request(service: Service, stub: target_pb2_grpc.TargetStub) -> None:
    with pytest.raises(grpc.RpcError) as late:
        list(stub.Generate(request(max_new_tokens=1000, timeout_ms=1), timeout=TIMEOUT_S))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert pages_held(service) == 0


def test_traces_reach_the_client(stub: target_pb2_grpc.TargetStub) -> None:
    replies = list(
        stub.Generate(request(speculation=common_pb2.SpeculationOptions(trace=True)), timeout=TIMEOUT_S)
    )
    rounds = [one for reply in replies for one in reply.delta.rounds]
    assert len(rounds) == 19
    assert all(len(one.nodes) == 1 and one.nodes[0].parent == -1 for one in rounds)
    assert [one.base_len for one in rounds] == list(range(6, 25))


def test_weights_can_be_borrowed(service: Service, stub: target_pb2_grpc.TargetStub) -> None:
    name = "model.embed_tokens.weight"
    chunks = (
        reply.chunk for reply in stub.GetTensor(target_pb2.GetTensorRequest(name=name), timeout=TIMEOUT_S)
    )
    ((found, weight),) = join_tensors(chunks, max_bytes=1 << 24)
    assert found == name
    assert torch.equal(weight, service.target.serving.decoder.embedding)
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.GetTensor(target_pb2.GetTensorRequest(name="model.norm.weight"), timeout=TIMEOUT_S))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_info_and_stats_describe_the_service(stub: target_pb2_grpc.TargetStub) -> None:
    info = stub.GetInfo(target_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
    assert (info.vocab_size, info.speculation.num_draft_tokens, info.speculation.state) == (VOCAB, 16, "none")
    generate(stub)
    stats = stub.GetStats(target_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
    assert stats.pages_total == 256
    assert stats.pages_free + stats.pages_held == stats.pages_total
    assert "outrider_time_to_first_token_seconds_bucket" in stats.prometheus_text
    assert (stats.auto.reason, stats.auto.HasField("estimated_speedup")) == ("idle", False)
    assert stats.uptime_s > 0
    assert "outrider_target_uptime_seconds " in stats.prometheus_text


async def test_a_full_queue_refuses_requests_with_a_retry_time(service: Service) -> None:
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = target_pb2_grpc.TargetStub(channel)

        async def requests() -> AsyncIterator[target_pb2.SessionRequest]:
            for index in range(80):
                yield target_pb2.SessionRequest(generate=request(str(index), max_new_tokens=200))

        errors = []
        finished = 0
        async for reply in stub.Session(requests(), timeout=TIMEOUT_S):
            errors += [one.error for one in reply.replies if one.HasField("error")]
            finished += sum(one.HasField("finish") for one in reply.replies)
        assert finished + len(errors) == 80
        assert finished >= 32
        assert errors
        assert all(error.status == 429 and error.retry_after_s > 0 for error in errors)
    assert pages_held(service) == 0


@pytest.mark.timeout(180)
def test_sigterm_lets_streams_finish_and_exits_with_zero(model: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/t.sock"
    command = (
        sys.executable,
        "-m",
        "outrider.services.cli",
        "serve",
        "target",
        "--model",
        str(model),
        "--listen",
        address,
    )
    with subprocess.Popen(
        (*command, "--threads", "1"), stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            with open_channel(address) as channel:
                health = health_pb2_grpc.HealthStub(channel)
                states = health.Watch(
                    health_pb2.HealthCheckRequest(service=SERVICE_NAME), wait_for_ready=True, timeout=120
                )
                assert any(state.status == health_pb2.HealthCheckResponse.SERVING for state in states)
                stub = target_pb2_grpc.TargetStub(channel)
                call = stub.Generate(request(max_new_tokens=900), timeout=60)
                first = next(call)
                process.send_signal(signal.SIGTERM)
                assert next(states).status == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(grpc.RpcError) as refused:
                    generate_for_ever(stub)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                replies = list(call)
                tokens = list(first.delta.token_ids) + [
                    token for reply in replies for token in reply.delta.token_ids
                ]
                assert len(tokens) == 900
                assert replies[-1].finish.reason == common_pb2.FINISH_REASON_LENGTH
            assert process.wait(20) == 0
        finally:
            process.kill()
