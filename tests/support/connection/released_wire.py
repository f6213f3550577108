"""The wire format of the previous release: what a peer of that release reads and writes.

`released_wire.binpb` has the descriptors of that release. `scripts/freeze_wire.py` writes it.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

RELEASED = Path(__file__).parent / "released_wire.binpb"
DRAFT_VERSIONS = (2, 2)
"""Lowest and highest version of the draft protocol of the previous release."""
DRAFT_FEATURES = (1, 2, 3)
"""Features of the draft protocol that the previous release supports."""
OFFERS = frozenset(["outrider.draft.v1.Hello", "outrider.draft.v1.HelloAck"])


def released_files() -> descriptor_pb2.FileDescriptorSet:
    """Return the descriptors of the previous release."""
    return descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes())


def _make_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for file in released_files().file:
        pool.Add(file)
    return pool


_POOL = _make_pool()


def released_method(path: str) -> MethodDescriptor | None:
    """Return the method of a gRPC path (``/package.Service/Method``), or None if that release has none."""
    service, method = path.strip("/").split("/")
    try:
        found: ServiceDescriptor = _POOL.FindServiceByName(service)
    except KeyError:
        return None
    return found.methods_by_name.get(method)


def as_released(data: bytes, name: str) -> bytes:
    """Return a serialized message as a peer of the previous release reads and writes it.

    Unknown fields are lost. The versions and features of a handshake become those of that release.

    Args:
        data: The message of this release.
        name: Full name of its type.
    """
    message: Message = message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name)).FromString(data)
    message.DiscardUnknownFields()  # type: ignore[no-untyped-call]
    _offer(message)
    return message.SerializeToString()


def _offer(message: Message) -> None:
    """Replace versions and features in a handshake, which may lie within another message."""
    if message.DESCRIPTOR.full_name in OFFERS:
        message.min_version, message.max_version = DRAFT_VERSIONS  # type: ignore[attr-defined]
        kept = [one for one in message.protocol_features if one in DRAFT_FEATURES]  # type: ignore[attr-defined]
        del message.protocol_features[:]  # type: ignore[attr-defined]
        message.protocol_features.extend(kept)  # type: ignore[attr-defined]
    for field, value in message.ListFields():
        if field.message_type is not None and isinstance(value, Message):
            _offer(value)
