"""gRPC offers every request field that REST takes: the table of both is complete in both directions."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from outrider.gateway.v1 import gateway_pb2
from outrider.services.gateway.schemas.base import OpenModel
from outrider.services.gateway.schemas.chat import ChatRequest
from outrider.services.gateway.schemas.completions import CompletionRequest
from outrider.services.gateway.schemas.native import NativeRequest, NativeSamplingParams

ROOT = Path(__file__).resolve().parents[3]
WHOLE = (
    "Constraint",
    "LogitBiasEntry",
    "Message",
    "SpeculationOptions",
    "TokenIds",
    "TokenSequence",
    "Tool",
)
"""Messages whose fields are not options, or have the same names in REST."""


def load_script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GRPC = load_script("grpc_fields")
STATUS = load_script("request_fields").status
TABLES = [
    (ChatRequest, GRPC.CHAT, gateway_pb2.ChatRequest),
    (CompletionRequest, GRPC.COMPLETE, gateway_pb2.CompleteRequest),
    (NativeRequest, GRPC.COMPLETE, gateway_pb2.CompleteRequest),
    (NativeSamplingParams, GRPC.COMPLETE, gateway_pb2.CompleteRequest),
]


def paths(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a message and of its nested options."""
    for field in descriptor.fields:
        if field.message_type is None or field.message_type.name in WHOLE:
            yield prefix + field.name
        else:
            yield from paths(field.message_type, f"{prefix}{field.name}.")


@pytest.mark.parametrize(("model", "table", "message"), TABLES)
def test_every_field_of_rest_has_one_in_grpc(
    model: type[OpenModel], table: dict[str, str], message: Any
) -> None:
    taken = {name for name in model.model_fields if STATUS(model, name) == "taken"}
    assert taken - table.keys() - GRPC.NOT_NEEDED.keys() == set(), "add them to the proto and to the table"
    existing = set(paths(message.DESCRIPTOR))
    for name in taken & table.keys():
        path = table[name]
        assert path in existing or any(one.startswith(f"{path}.") for one in existing), name


@pytest.mark.parametrize(("table", "message"), [(one, made) for _, one, made in TABLES[:2]])
def test_every_field_of_grpc_is_in_the_table(table: dict[str, str], message: Any) -> None:
    assert set(paths(message.DESCRIPTOR)) - {*table.values(), *GRPC.GRPC_ONLY} == set()


def test_the_page_contains_the_table() -> None:
    assert GRPC.main(["--check"]) == 0, "run: python scripts/grpc_fields.py"
