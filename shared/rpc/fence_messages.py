"""Converts between `Fence`, which identifies a committed state of a sequence, and its protobuf message."""

from __future__ import annotations

from outrider.draft.v1 import draft_pb2
from outrider.shared.spec.fence import Fence


def fence_from_proto(fence: draft_pb2.Fence) -> Fence:
    """Convert a protobuf message to a fence."""
    return Fence(fence.session_id, fence.epoch, fence.committed_len, fence.prefix_hash)


def fence_to_proto(fence: Fence) -> draft_pb2.Fence:
    """Convert a fence to its protobuf message."""
    return draft_pb2.Fence(
        session_id=fence.session_id,
        epoch=fence.epoch,
        committed_len=fence.committed_len,
        prefix_hash=fence.prefix_hash,
    )
