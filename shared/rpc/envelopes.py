"""Encodes and decodes protobuf messages that consist of a few numbers and one blob, with few copies.

A protobuf message class copies a blob two or three times when the message is sent, and again when the message
is received. Here, the bytes around the blob are encoded in advance. Sending then copies the blob once, and
receiving returns a view.

The encoded bytes are the same as those of protobuf. The blob must be the last field of an inner message. The
inner message must be the only field of the message that is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from outrider.draft.v1 import draft_pb2

STATE_FIELDS = draft_pb2.RoundState.DESCRIPTOR.fields_by_name
TREES_FIELDS = draft_pb2.RoundTrees.DESCRIPTOR.fields_by_name
REQUESTS = draft_pb2.SessionRequest.DESCRIPTOR.fields_by_name
REPLIES = draft_pb2.SessionReply.DESCRIPTOR.fields_by_name

Blob = bytes | memoryview
Expand = Callable[[Blob, memoryview], None]
"""A function that writes a received blob to its places in a block of memory."""
LENGTH_DELIMITED = 2
MOST_LENGTH_BYTES = 5
LENGTHS_KEPT = 1024
"""Entries of each cache of encoded lengths. A few entries suffice, because blobs have few different sizes."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The encoded bytes around the blob of one protobuf message.

    Attributes:
        outer_tag: Tag bytes of the outer message's only field.
        inner: The inner message's encoded fields before the blob, followed by the blob's tag.
    """

    outer_tag: bytes
    inner: bytes

    @staticmethod
    def around(outer_field: int, others: bytes, blob_field: int) -> Envelope:
        """Encode the bytes around the blob of a message.

        Args:
            outer_field: Field number of the inner message in the message that is sent.
            others: The inner message, encoded without its blob.
            blob_field: Field number of the blob in the inner message. Must be the highest field number there.
        """
        return Envelope(_tag(outer_field), others + _tag(blob_field))

    def seal(self, *parts: Blob) -> bytes:
        """Return the encoded message around a blob that consists of these parts."""
        size = sum(map(len, parts))
        length = _varint(size)
        return b"".join(
            (self.outer_tag, _varint(len(self.inner) + len(length) + size), self.inner, length, *parts)
        )

    def open(self, message: bytes) -> memoryview | None:
        """Return a view of the blob in a message made by `seal`. Return None for any other message."""
        lengths = _lengths(len(self.outer_tag), len(self.inner), len(message))
        if lengths is None:
            return None
        head = b"".join((self.outer_tag, lengths[0], self.inner, lengths[1]))
        return memoryview(message)[len(head) :] if message.startswith(head) else None


@dataclass(frozen=True, slots=True)
class BlobEnvelopes:
    """The two envelopes of one device round: one for the state and one for the trees."""

    state: Envelope
    trees: Envelope

    @staticmethod
    def of(message: draft_pb2.RoundsNext) -> BlobEnvelopes:
        """Make the envelopes of the round that a message announces."""
        state = draft_pb2.RoundState(rounds=message.rounds, number=message.number).SerializeToString()
        trees = draft_pb2.RoundTrees(rounds=message.rounds, number=message.number).SerializeToString()
        return BlobEnvelopes(
            Envelope.around(REQUESTS["round_state"].number, state, STATE_FIELDS["state"].number),
            Envelope.around(REPLIES["round_trees"].number, trees, TREES_FIELDS["trees"].number),
        )


def _tag(field: int) -> bytes:
    return _varint(field << 3 | LENGTH_DELIMITED)


@functools.lru_cache(LENGTHS_KEPT)
def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.lru_cache(LENGTHS_KEPT)
def _lengths(tag: int, inner: int, total: int) -> tuple[bytes, bytes] | None:
    """Return the two length fields of a message, or None if no message of this size exists.

    Args:
        tag: Bytes of the outer tag.
        inner: Bytes of the inner part.
        total: Bytes of the whole message.
    """
    for taken in range(1, MOST_LENGTH_BYTES + 1):
        behind = total - tag - taken
        for also_taken in range(1, MOST_LENGTH_BYTES + 1):
            size = behind - inner - also_taken
            if size >= 0 and len(_varint(behind)) == taken and len(_varint(size)) == also_taken:
                return _varint(behind), _varint(size)
    return None
