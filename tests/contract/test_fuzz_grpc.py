"""Sends generated messages to every gRPC method: no call hangs, and no error is the server's fault."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from gateway_thread import GatewayThread
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.gateway.v1 import gateway_pb2, gateway_pb2_grpc

TIMEOUT_S = 30
FUZZ = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SERVICE = gateway_pb2.DESCRIPTOR.services_by_name["Inference"]
METHODS = {method.name: method for method in SERVICE.methods}
FAULTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
TEXT = st.text(max_size=12) | st.sampled_from(
    ["user", "assistant", "tool", "toy", "auto", "{}", "[1]", "null", '{"enable_thinking": true}', "[" * 2000]
)
INTEGERS = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_SINT32: (-(2**31), 2**31 - 1),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Return values of one field, repeated or not."""
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            one: st.SearchStrategy[Any] = TEXT
        case FieldDescriptor.TYPE_BOOL:
            one = st.booleans()
        case FieldDescriptor.TYPE_FLOAT:
            one = st.floats(width=32)
        case FieldDescriptor.TYPE_ENUM:
            one = st.sampled_from([0, 1, 2, 3, 77])
        case FieldDescriptor.TYPE_MESSAGE:
            one = messages(field.message_type)
        case kind:
            low, high = INTEGERS[kind]
            one = st.integers(max(low, -3), 40) | st.sampled_from([low, high])
    return st.lists(one, max_size=4) if field.is_repeated else one


def messages(descriptor: Descriptor) -> st.SearchStrategy[Any]:
    """Return messages of a type. Most fields of most messages are absent."""
    fields = list(descriptor.fields)
    chosen = st.lists(st.sampled_from(fields), unique_by=lambda field: field.name, max_size=4)
    made = (chosen if fields else st.just([])).flatmap(
        lambda fields: st.fixed_dictionaries({field.name: values(field) for field in fields})
    )
    return made.map(lambda given: build(descriptor, given))


def build(descriptor: Descriptor, given: dict[str, Any]) -> Any:
    """Return a message with the given fields. Entries of a map become the last of equal keys."""
    for name, value in given.items():
        entry = descriptor.fields_by_name[name].message_type
        if entry is not None and entry.GetOptions().map_entry:
            given[name] = {one.key: one.value for one in value}
    return GetMessageClass(descriptor)(**given)


def error_of(stub: gateway_pb2_grpc.InferenceStub, name: str, message: Any) -> grpc.RpcError | None:
    """Call a method to its end, and return its error if it failed."""
    try:
        answer = getattr(stub, name)(message, timeout=TIMEOUT_S)
        if METHODS[name].server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return error
    return None


VALID = {
    "Chat": gateway_pb2.ChatRequest(messages=[gateway_pb2.Message(role="user", content="The quick")]),
    "Complete": gateway_pb2.CompleteRequest(text="The quick"),
    "Tokenize": gateway_pb2.TokenizeRequest(text="The quick"),
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_generated_messages_are_answered_or_refused(gateway: GatewayThread, name: str) -> None:
    descriptor = METHODS[name].input_type
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)

        @FUZZ
        @given(message=messages(descriptor), valid=st.booleans())
        def send(message: Any, valid: bool) -> None:
            if valid and name in VALID:
                merged = GetMessageClass(descriptor)()
                merged.CopyFrom(VALID[name])
                merged.MergeFrom(message)
                message = merged
            if (error := error_of(stub, name, message)) is not None:
                assert error.code() not in FAULTS, (error.details(), message)
                assert error.details()

        send()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_bytes_that_are_no_message_are_refused(gateway: GatewayThread, name: str) -> None:
    path = f"/{SERVICE.full_name}/{name}"
    with grpc.insecure_channel(gateway.stack.grpc_address) as channel:
        raw = channel.unary_stream(path, request_serializer=bytes, response_deserializer=bytes)
        for body in (b"\xff" * 40, b"\x0a\x05ab", b"\x08" + b"\xff" * 11, b"\x12\xff\xff\xff\xff\x0f"):
            with pytest.raises(grpc.RpcError) as caught:
                list(raw(body, timeout=TIMEOUT_S))
            assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        gateway_pb2_grpc.InferenceStub(channel).ListModels(gateway_pb2.ListModelsRequest(), timeout=TIMEOUT_S)
