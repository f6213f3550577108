"""Messages that are a few numbers and one blob, put together and taken apart around the blob.

A message class copies a blob two or three times on its way to the wire, and as often on its way back. Here what surrounds the blob is
encoded while there is time; then the blob is put behind it, in one copy, or found in what came, in none. The bytes are those that protobuf
writes: the blob is the last field of a message that is the only field of the one that is sent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from outrider.draft.v1 import draft_pb2

STATE_FIELDS = draft_pb2.RoundState.DESCRIPTOR.fields_by_name
TREES_FIELDS = draft_pb2.RoundTrees.DESCRIPTOR.fields_by_name
REQUESTS = draft_pb2.SessionRequest.DESCRIPTOR.fields_by_name
REPLIES = draft_pb2.SessionReply.DESCRIPTOR.fields_by_name

Blob = bytes | memoryview
LENGTH_DELIMITED = 2
MOST_LENGTH_BYTES = 5
LENGTHS_KEPT = 1024
"""Blobs have few sizes."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds the blob of one message.

    Attributes:
        outer_tag: Of the field that holds all the rest.
        inner: The other fields, encoded, and the blob's tag.
    """

    outer_tag: bytes
    inner: bytes

    @staticmethod
    def around(outer_field: int, others: bytes, blob_field: int) -> Envelope:
        """Make one.

        Args:
            outer_field: Number of the field of the message that is sent.
            others: The message in that field, encoded without its blob.
            blob_field: The blob's number in it, the highest.
        """
        return Envelope(_tag(outer_field), others + _tag(blob_field))

    def seal(self, blob: Blob) -> bytes:
        """Return the encoded message."""
        size = len(blob)
        length = _varint(size)
        return b"".join(
            (self.outer_tag, _varint(len(self.inner) + len(length) + size), self.inner, length, blob)
        )

    def open(self, message: bytes) -> memoryview | None:
        """Return the blob of a message that `seal` could have made, a view of its bytes; None for every other message."""
        lengths = _lengths(len(self.outer_tag), len(self.inner), len(message))
        if lengths is None:
            return None
        head = b"".join((self.outer_tag, lengths[0], self.inner, lengths[1]))
        return memoryview(message)[len(head) :] if message.startswith(head) else None


@dataclass(frozen=True, slots=True)
class BlobEnvelopes:
    """What surrounds the state of a round on the device, and its trees."""

    state: Envelope
    trees: Envelope

    @staticmethod
    def of(message: draft_pb2.RoundsNext) -> BlobEnvelopes:
        """Make those of the round that a message is about."""
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
    """Return the two lengths in a message of `total` bytes, whose tag and inner part have so many; None if there is none of that size."""
    for taken in range(1, MOST_LENGTH_BYTES + 1):
        behind = total - tag - taken
        for also_taken in range(1, MOST_LENGTH_BYTES + 1):
            size = behind - inner - also_taken
            if size >= 0 and len(_varint(behind)) == taken and len(_varint(size)) == also_taken:
                return _varint(behind), _varint(size)
    return None
