"""The versions and features of the draft protocol, and how two sides agree on them.

One test fails if the protocol's wire format changes, until the change is recorded under the right version.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from google.protobuf import descriptor_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.common.v1 import common_pb2
from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc import version
from outrider.shared.rpc.ipc.blob_mailbox import BlobLayout
from outrider.shared.rpc.ipc.doorbells import Side, Word
from outrider.shared.rpc.ipc.frames import HEADER, FrameKind
from outrider.shared.rpc.version import (
    FEATURES,
    MAX_VERSION,
    VERSION_2_FEATURES,
    Agreed,
    Feature,
    VersionOffer,
    agree,
    agree_with_ack,
)
from outrider.shared.spec.resident import RoundState, TreesBlob

WIRE = (3, "9090576762483048")
"""The protocol's highest version, and a digest of its wire format.

If a change fails here, update the digest. Also increment `MAX_VERSION` if the previous release cannot handle
the change.
"""
MAX_UINT32 = 2**32 - 1
MESSAGES = (draft_pb2.Hello, draft_pb2.HelloAck)
Message = draft_pb2.Hello | draft_pb2.HelloAck

feature_sets = st.frozensets(st.sampled_from(Feature))


@st.composite
def ranges(draw: st.DrawFn) -> range:
    """Ranges of versions, short enough that two of them often have no version in common."""
    lowest = draw(st.integers(1, 8))
    return range(lowest, draw(st.integers(lowest, lowest + 3)) + 1)


def test_the_wire_changes_with_its_version() -> None:
    digest = hashlib.sha256("\n".join([*messages(), *blobs(), *shared_memory()]).encode()).hexdigest()[:16]
    assert (MAX_VERSION, digest) == WIRE


def test_this_release_agrees_with_itself_on_everything_that_it_supports() -> None:
    agreed = agree(VersionOffer.ours(Side.TARGET), VersionOffer.ours(Side.DRAFT))
    assert agreed == Agreed(MAX_VERSION, FEATURES)
    names = "mailbox, trace_logprobs, slotted_rounds, compact_states, stored_rows"
    assert str(agreed) == f"version {MAX_VERSION}, features: {names}"


def test_every_feature_of_the_proto_has_a_name() -> None:
    named = {"PROTOCOL_FEATURE_UNSPECIFIED": 0}
    named |= {f"PROTOCOL_FEATURE_{feature.name}": feature.value for feature in Feature}
    assert named == dict(draft_pb2.ProtocolFeature.items())


@given(ranges(), ranges(), feature_sets, feature_sets)
def test_both_sides_agree_on_the_highest_common_version_and_the_common_features(
    target_range: range, draft_range: range, targets: frozenset[Feature], drafts: frozenset[Feature]
) -> None:
    target, draft = offer(Side.TARGET, target_range, targets), offer(Side.DRAFT, draft_range, drafts)
    common = set(target_range) & set(draft_range)
    if common:
        assert agree(target, draft) == agree(draft, target) == Agreed(max(common), targets & drafts)
        return
    older, newer = sorted((target, draft), key=lambda one: one.min_version)
    for theirs, ours in ((target, draft), (draft, target)):
        with pytest.raises(ProtocolError) as error:
            agree(theirs, ours)
        assert error.value.field == "protocol_version"
        assert error.value.message == (
            f"The {theirs.side.value} supports {in_words(theirs)} of the draft protocol, this "
            f"{ours.side.value} {in_words(ours)}. The {older.side.value} is older: update it to a release "
            f"that supports version {newer.min_version}."
        )


@given(ranges(), feature_sets, st.sets(st.integers(7, 2**31 - 1)), st.sampled_from(MESSAGES), st.data())
def test_an_offer_survives_the_wire_and_unknown_features_are_ignored(
    versions: range, features: frozenset[Feature], unknown: set[int], kind: type[Message], data: st.DataObject
) -> None:
    sent = offer(Side.TARGET if kind is draft_pb2.Hello else Side.DRAFT, versions, features)
    message = kind()
    sent.write(message, data.draw(st.sampled_from(versions)))
    message.protocol_features.extend(unknown)  # type: ignore[arg-type]
    assert VersionOffer.of(kind.FromString(message.SerializeToString())) == sent


@given(st.integers(1, MAX_UINT32), st.sampled_from(MESSAGES))
def test_a_peer_without_a_range_supports_only_its_single_version(single: int, kind: type[Message]) -> None:
    read = VersionOffer.of(kind(protocol_version=single, protocol_features=[1]))
    assert (read.min_version, read.max_version) == (single, single)
    assert read.features == (VERSION_2_FEATURES if single == 2 else frozenset())


@given(
    st.integers(0, MAX_UINT32),
    st.integers(0, MAX_UINT32),
    st.integers(0, MAX_UINT32),
    st.sampled_from(MESSAGES),
)
@example(0, 0, 0, draft_pb2.Hello)
@example(2, 0, 2, draft_pb2.Hello)
@example(2, 2, 0, draft_pb2.HelloAck)
@example(0, 1, 3, draft_pb2.Hello)
@example(2, 3, 1, draft_pb2.HelloAck)
def test_any_numbers_make_an_offer_or_a_clear_refusal(
    single: int, lowest: int, highest: int, kind: type[Message]
) -> None:
    side = "target" if kind is draft_pb2.Hello else "draft"
    message = kind(protocol_version=single, min_version=lowest, max_version=highest)
    ranged = bool(lowest or highest)
    if (1 <= lowest <= single <= highest) if ranged else single:
        read = VersionOffer.of(message)
        assert read.min_version <= single <= read.max_version
        return
    with pytest.raises(ProtocolError) as error:
        VersionOffer.of(message)
    inverted = ranged and not 1 <= lowest <= highest
    assert error.value.field == ("min_version" if inverted else "protocol_version")
    assert error.value.message.startswith(f"The {side} sent ")


@pytest.mark.parametrize("chosen", range(1, 4))
def test_a_draft_must_choose_the_highest_common_version(monkeypatch: pytest.MonkeyPatch, chosen: int) -> None:
    monkeypatch.setattr(version, "MIN_VERSION", 1)
    monkeypatch.setattr(version, "MAX_VERSION", 2)
    ack = draft_pb2.HelloAck(protocol_version=chosen, min_version=1, max_version=3)
    if chosen == 2:
        assert agree_with_ack(ack).version == 2
        return
    with pytest.raises(
        ProtocolError, match=f"chose version {chosen} of .* support version 2: update the draft"
    ):
        agree_with_ack(ack)


def offer(side: Side, versions: range, features: frozenset[Feature]) -> VersionOffer:
    return VersionOffer(side, versions[0], versions[-1], features)


def in_words(one: VersionOffer) -> str:
    single = one.min_version == one.max_version
    return f"version {one.min_version}" if single else f"versions {one.min_version} to {one.max_version}"


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
