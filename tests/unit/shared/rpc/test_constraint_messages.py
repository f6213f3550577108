"""Constraints survive the way to the target, and invalid messages are refused."""

from __future__ import annotations

import pytest

from outrider.common.v1 import common_pb2
from outrider.shared.base.constraint import MAX_CHOICES, Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError
from outrider.shared.rpc.constraint_messages import constraint_from_proto, constraint_to_proto


@pytest.mark.parametrize("kind", ConstraintKind)
def test_a_constraint_survives_the_wire(kind: ConstraintKind) -> None:
    source = '["a"]' if kind is ConstraintKind.CHOICE else "a"
    asked = Constraint(kind, source, "</think>", "<think>", "regex")
    message = constraint_to_proto(asked)
    assert message is not None
    found = constraint_from_proto(common_pb2.Constraint.FromString(message.SerializeToString()))
    assert found == asked
    assert found.field == "regex"


def test_no_constraint_has_no_message() -> None:
    assert constraint_to_proto(None) is None


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.Constraint(),
        common_pb2.Constraint(regex=""),
        common_pb2.Constraint(regex="a", opening="x" * 257),
        common_pb2.Constraint(choice='["a", 1]'),
        common_pb2.Constraint(choice=str(["a"] * (MAX_CHOICES + 1)).replace("'", '"')),
    ],
)
def test_an_invalid_message_is_refused(message: common_pb2.Constraint) -> None:
    message.field = "f"
    with pytest.raises(InvalidRequestError) as caught:
        constraint_from_proto(message)
    assert caught.value.field == "f"
