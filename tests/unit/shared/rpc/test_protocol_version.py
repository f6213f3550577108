"""Fails if the draft protocol's wire format changes, until the change is recorded under the right version."""

from __future__ import annotations

import hashlib

import pytest
import torch
from google.protobuf import descriptor_pb2

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.blob_mailbox import BlobLayout
from outrider.shared.rpc.ipc.doorbells import Side, Word
from outrider.shared.rpc.ipc.frames import HEADER, FrameKind
from outrider.shared.rpc.version import PROTOCOL_VERSION, check_version
from outrider.shared.spec.resident import RoundState, TreesBlob

WIRE = (2, "74bbfb57545c3cdd")
"""The protocol's version, and a digest of its wire format.

If a change fails here, update the digest. Also increment `PROTOCOL_VERSION` if the previous release cannot
handle the change.
"""


def test_the_wire_changes_with_its_version() -> None:
    digest = hashlib.sha256("\n".join([*messages(), *blobs(), *shared_memory()]).encode()).hexdigest()[:16]
    assert (PROTOCOL_VERSION, digest) == WIRE


def test_equal_versions_pass() -> None:
    for side in Side:
        check_version(PROTOCOL_VERSION, side)


@pytest.mark.parametrize(
    ("theirs", "side", "older"),
    [(1, "target", "target"), (9, "target", "draft"), (0, "draft", "draft"), (9, "draft", "target")],
)
def test_a_version_mismatch_names_both_versions_and_the_side_to_update(
    theirs: int, side: str, older: str
) -> None:
    with pytest.raises(ProtocolError) as error:
        check_version(theirs, Side(side))
    assert error.value.field == "protocol_version"
    assert f"The {side} uses version {theirs} " in error.value.message
    assert f"version {PROTOCOL_VERSION}: update the {older}" in error.value.message


def messages() -> list[str]:
    """Return every field of every message and every name of every enum, one per line."""
    lines: list[str] = []
    for module in (common_pb2, draft_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            lines += [
                f"{message.name} {field.number} {field.name} {field.type} {field.type_name} "
                f"{field.label} {field.HasField('oneof_index')}"
                for field in message.field
            ]
        for enum in file.enum_type:
            lines += [f"{enum.name} {value.number} {value.name}" for value in enum.value]
    return sorted(lines)


def blobs() -> list[str]:
    """Return where the parts of a round's two blobs lie."""
    state = RoundState.idle(3, 4, 8, torch.bfloat16, "cpu")
    trees = TreesBlob.make(3, 5, torch.device("cpu"))
    assert state.packed is not None
    parts = {
        "lens": state.committed_lens,
        "counts": state.counts,
        "tokens": state.tokens,
        "features": state.features,
    }
    lines = [
        f"state {name} {part.data_ptr() - state.packed.data_ptr()} {part.dtype}"
        for name, part in parts.items()
    ]
    parts = {
        "number": trees.number,
        "num_nodes": trees.num_nodes,
        "tokens": trees.tokens,
        "parents": trees.parents,
    }
    lines += [
        f"trees {name} {part.data_ptr() - trees.blob.data_ptr()} {part.dtype}" for name, part in parts.items()
    ]
    return [*lines, f"{state.packed.nbytes} {trees.blob.nbytes}"]


def shared_memory() -> list[str]:
    """Return the layout of the frames, words and slots of a connection within one host."""
    layout = BlobLayout()
    lines = [f"{kind.name} {kind.value}" for kind in FrameKind] + [
        f"{word.name} {word.value}" for word in Word
    ]
    return [*lines, HEADER.format, f"{layout.state_slot(1)} {layout.trees_slot(1)} {layout.slots_bytes}"]
