"""Converts constraints of the output (`shared.base.constraint`) to and from protobuf."""

from __future__ import annotations

from outrider.common.v1 import common_pb2
from outrider.shared.base.constraint import Constraint, ConstraintKind
from outrider.shared.base.errors import InvalidRequestError


def constraint_from_proto(message: common_pb2.Constraint) -> Constraint:
    """Return the constraint of a request.

    Raises:
        InvalidRequestError: The constraint has no source, or is too large. The error names the field.
    """
    kind = message.WhichOneof("source")
    field = message.field or "constraint"
    if kind is None:
        raise InvalidRequestError(
            f"{field} must have one of {', '.join(one.value for one in ConstraintKind)}.", field=field
        )
    constraint = Constraint(
        ConstraintKind(kind),
        getattr(message, kind),
        begins_after=message.begins_after,
        opening=message.opening,
        field=field,
    )
    constraint.check()
    return constraint


def constraint_to_proto(constraint: Constraint | None) -> common_pb2.Constraint | None:
    """Return the protobuf message of a constraint. Return None if `constraint` is None."""
    if constraint is None:
        return None
    message = common_pb2.Constraint(
        begins_after=constraint.begins_after, opening=constraint.opening, field=constraint.field
    )
    setattr(message, constraint.kind.value, constraint.source)
    return message
