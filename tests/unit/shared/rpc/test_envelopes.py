"""Message envelopes around a blob: their bytes equal protobuf's, and all other messages are rejected."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.draft.v1 import draft_pb2
from outrider.shared.rpc.envelopes import BlobEnvelopes, Envelope

SIZES = (1, 100, 127, 128, 16_383, 16_384, 49_664, 3 << 20)


def blob_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("rounds", "number"), [(1, 1), (1 << 40, (1 << 31) - 1), (0, 0)])
def test_sealed_messages_equal_protobufs_bytes(size: int, rounds: int, number: int) -> None:
    blob = blob_of(size)
    envelopes = BlobEnvelopes.of(draft_pb2.RoundsNext(rounds=rounds, number=number))
    request = draft_pb2.SessionRequest(
        round_state=draft_pb2.RoundState(rounds=rounds, number=number, state=blob)
    ).SerializeToString()
    reply = draft_pb2.SessionReply(
        round_trees=draft_pb2.RoundTrees(rounds=rounds, number=number, trees=blob)
    ).SerializeToString()
    for envelope, message in ((envelopes.state, request), (envelopes.trees, reply)):
        assert envelope.seal(blob) == envelope.seal(np.frombuffer(blob, dtype=np.uint8).data) == message
        opened = envelope.open(message)
        assert opened is not None
        assert bytes(opened) == blob


def test_an_empty_blob_is_read_as_one() -> None:
    message = BlobEnvelopes.of(draft_pb2.RoundsNext(rounds=3, number=4)).state.seal(b"")
    read = draft_pb2.SessionRequest.FromString(message)
    assert (read.round_state.rounds, read.round_state.number, read.round_state.state) == (3, 4, b"")


def test_other_messages_are_not_opened() -> None:
    envelope = BlobEnvelopes.of(draft_pb2.RoundsNext(rounds=1, number=300)).state
    message = envelope.seal(blob_of(200))
    others = [
        BlobEnvelopes.of(draft_pb2.RoundsNext(rounds=1, number=301)).state.seal(blob_of(200)),
        BlobEnvelopes.of(draft_pb2.RoundsNext(rounds=2, number=300)).state.seal(blob_of(200)),
        BlobEnvelopes.of(draft_pb2.RoundsNext(rounds=1, number=300)).trees.seal(blob_of(200)),
        draft_pb2.SessionRequest(ping=draft_pb2.Ping(nonce=1)).SerializeToString(),
        message + message,
        message + b"\0",
        envelope.outer_tag,
        envelope.outer_tag + b"\xff" * 12,
        b"",
    ]
    assert [envelope.open(other) for other in others] == [None] * len(others)
    assert [envelope.open(message[:length]) for length in range(len(message))] == [None] * len(message)


def test_a_damaged_envelope_never_yields_a_wrong_blob() -> None:
    envelope = Envelope.around(9, draft_pb2.RoundState(rounds=7, number=70_000).SerializeToString(), 3)
    message = envelope.seal(blob_of(300))
    chance = random.Random(0)
    for _ in range(2000):
        damaged = bytearray(message)
        damaged[chance.randrange(len(message) - 300)] = chance.randrange(256)
        opened = envelope.open(bytes(damaged))
        assert opened is None or bytes(opened) == message[-300:]
