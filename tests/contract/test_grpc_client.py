"""A plain gRPC client against the gateway's public API. These tests make no assumptions about the target."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import httpx
import pytest
from gateway_thread import Stack
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.common.v1 import common_pb2
from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from outrider.shared.base.errors import ErrorCode
from outrider.shared.rpc.interceptors import error_from_rpc

SERVICE = "outrider.gateway.v1.Inference"
TIMEOUT_S = 30


@pytest.fixture
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(stack.grpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> gateway_pb2_grpc.InferenceStub:
    return gateway_pb2_grpc.InferenceStub(channel)


def chat(text: str = "List 3 countries.", **options) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(
        messages=[gateway_pb2.Message(role="user", content=text)],
        options=gateway_pb2.GenerationOptions(**options),
    )


def test_a_chat_streams_chunks_and_ends_with_one_finished(stub) -> None:
    sampling = common_pb2.SamplingOptions(temperature=0.8, seed=7)
    replies = list(stub.Chat(chat(max_tokens=10, sampling=sampling), timeout=TIMEOUT_S))
    assert [reply.WhichOneof("event") for reply in replies] == ["chunk"] * (len(replies) - 1) + ["finished"]
    finished = replies[-1].finished
    assert sum(len(reply.chunk.token_ids) for reply in replies[:-1]) == finished.usage.completion_tokens
    assert finished.reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
    assert finished.seed == 7
    assert finished.speculation.rounds >= 1


def test_both_surfaces_give_the_same_text(stub, stack: Stack) -> None:
    body = {
        "messages": [{"role": "user", "content": "List 3 countries."}],
        "max_tokens": 10,
        "temperature": 0.8,
        "seed": 7,
    }
    rest = httpx.post(f"{stack.base_url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).json()
    sampling = common_pb2.SamplingOptions(temperature=0.8, seed=7)
    replies = stub.Chat(chat(max_tokens=10, sampling=sampling), timeout=TIMEOUT_S)
    assert "".join(reply.chunk.text for reply in replies) == rest["choices"][0]["message"]["content"]


def test_a_drawn_seed_is_told_and_reproduces_the_answer(stub) -> None:
    first = list(stub.Chat(chat(max_tokens=10), timeout=TIMEOUT_S))
    seed = first[-1].finished.seed
    again = stub.Chat(chat(max_tokens=10, sampling=common_pb2.SamplingOptions(seed=seed)), timeout=TIMEOUT_S)
    assert "".join(reply.chunk.text for reply in again) == "".join(reply.chunk.text for reply in first)


def test_complete_takes_text_or_ids(stub) -> None:
    options = gateway_pb2.GenerationOptions(max_tokens=4, sampling=common_pb2.SamplingOptions(temperature=0))
    by_ids = list(
        stub.Complete(
            gateway_pb2.CompleteRequest(token_ids=gateway_pb2.TokenIds(ids=[9, 10]), options=options),
            timeout=TIMEOUT_S,
        )
    )
    assert by_ids[-1].finished.usage.prompt_tokens == 2
    by_text = list(
        stub.Complete(gateway_pb2.CompleteRequest(text="The quick", options=options), timeout=TIMEOUT_S)
    )
    assert by_text[-1].finished.usage.completion_tokens >= 1


def test_a_trace_comes_round_by_round(stub) -> None:
    speculation = common_pb2.SpeculationOptions(mode=common_pb2.SPECULATION_MODE_ON, trace=True)
    replies = list(stub.Chat(chat(max_tokens=8, speculation=speculation), timeout=TIMEOUT_S))
    rounds = [one for reply in replies for one in reply.chunk.rounds]
    assert len(rounds) == replies[-1].finished.speculation.rounds >= 1
    assert all(len(reply.chunk.rounds) <= 1 for reply in replies)
    assert all(node.HasField("text") for one in rounds for node in one.nodes)
    assert all(len(one.emitted_text) <= len(one.emitted) for one in rounds)


@pytest.mark.parametrize(
    ("request_", "field", "reason"),
    [
        (gateway_pb2.ChatRequest(), "messages", "invalid_value"),
        (
            gateway_pb2.ChatRequest(messages=[gateway_pb2.Message(role="robot", content="x")]),
            "messages.0.role",
            "invalid_value",
        ),
        (chat(sampling=common_pb2.SamplingOptions(top_p=2)), "options.top_p", "invalid_value"),
        (
            chat(sampling=common_pb2.SamplingOptions(temperature=float("nan"))),
            "options.temperature",
            "invalid_value",
        ),
        (chat(max_tokens=0), "options.max_tokens", "invalid_value"),
        (
            chat(speculation=common_pb2.SpeculationOptions(max_nodes=0)),
            "options.speculation.max_nodes",
            "invalid_value",
        ),
        (
            chat(speculation=common_pb2.SpeculationOptions(mode=9)),
            "options.speculation.mode",
            "invalid_value",
        ),
        (chat(stop=["a"] * 33), "options.stop", "invalid_value"),
        (chat(stop_regex=["a", "("]), "options.stop_regex", "invalid_value"),
        (chat("word " * 5000), "messages", "context_length_exceeded"),
        (chat(max_tokens=10**6), "options.max_tokens", "context_length_exceeded"),
    ],
)
def test_wrong_fields_are_invalid_argument_and_named(stub, request_, field: str, reason: str) -> None:
    replies = stub.Chat(request_, timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as caught:
        next(replies)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_rpc(caught.value)
    assert (error.field, error.reason) == (field, reason)


def test_an_unknown_model_is_not_found(stub) -> None:
    replies = stub.Complete(gateway_pb2.CompleteRequest(model="unknown", text="x"), timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as caught:
        next(replies)
    assert error_from_rpc(caught.value).code is ErrorCode.NOT_FOUND


def test_models_health_and_reflection(channel, stub, stack: Stack) -> None:
    models = stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=TIMEOUT_S).models
    assert [model.id for model in models] == [stack.model]
    assert models[0].max_model_len > 0
    for name in ("", SERVICE):
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S
        )
        assert any(reply.status == health_pb2.HealthCheckResponse.SERVING for reply in watch)
        watch.cancel()
    reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=TIMEOUT_S
    )
    assert SERVICE in {service.name for service in next(reflected).list_services_response.service}


def test_a_message_that_does_not_parse_is_refused(channel) -> None:
    replies = channel.unary_stream(f"/{SERVICE}/Chat")(b"\xff\xff\xff", timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as caught:
        next(replies)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_request_id_is_echoed_or_made(stub) -> None:
    call = stub.ListModels.with_call(
        gateway_pb2.ListModelsRequest(), timeout=TIMEOUT_S, metadata=(("x-request-id", "mine-1"),)
    )[1]
    assert dict(call.initial_metadata())["x-request-id"] == "mine-1"
    streamed = stub.Chat(chat(max_tokens=1), timeout=TIMEOUT_S)
    assert len(dict(streamed.initial_metadata())["x-request-id"]) == 32
    assert list(streamed)
