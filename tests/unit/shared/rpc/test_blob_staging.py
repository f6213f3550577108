"""Blob staging: copies of blobs between a device and messages."""

from __future__ import annotations

import pytest
import torch

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.blob_staging import BlobStaging


def test_a_blob_round_trip_keeps_the_bytes_and_sets_the_round_number() -> None:
    there, back = BlobStaging(), BlobStaging()
    for number, size in ((7, 300), (8, 300), (9, 4096)):
        blob = torch.randint(0, 256, (size,), dtype=torch.uint8)
        fetched = there.fetch(blob)
        there.settle(blob)
        other = torch.zeros(size, dtype=torch.uint8)
        back.load(fetched.numpy().tobytes(), number, other)
        assert other[:4].view(torch.int32).item() == number
        assert torch.equal(other[4:], blob[4:])


def test_missing_bytes_at_the_end_leave_the_blob_unchanged() -> None:
    back, blob = BlobStaging(), torch.zeros(64, dtype=torch.uint8)
    back.load(bytes([5]) * 64, 1, blob)
    back.load(bytes([6]) * 40, 2, blob, least_bytes=16)
    assert blob[:4].view(torch.int32).item() == 2
    assert blob[4:].tolist() == [6] * 36 + [5] * 24
    with pytest.raises(ProtocolError, match="64"):
        back.load(bytes(15), 3, blob, least_bytes=16)


def test_bytes_of_another_size_are_refused_and_nothing_is_written() -> None:
    blob = torch.ones(64, dtype=torch.uint8)
    for data in (b"", bytes(63), bytes(65)):
        with pytest.raises(ProtocolError, match="64"):
            BlobStaging().load(data, 1, blob)
    assert torch.equal(blob, torch.ones(64, dtype=torch.uint8))
