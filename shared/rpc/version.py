"""Versions and features of the draft protocol, and how target and draft agree on them.

The target sends a `VersionOffer` in Hello, and the draft sends one in HelloAck. Both sides pass the two
offers to `agree`, which returns the same result on both sides.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum

from outrider.draft.v1 import draft_pb2
from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.doorbells import Side

MIN_VERSION, MAX_VERSION = 2, 3
"""Lowest and highest version of the draft protocol that this release supports.

Increment the highest version for any change that the previous release would reject or misread. Examples of
such changes are a new message on a stream, another layout of a round's blobs, and another meaning of a field.
A new optional field needs no increment. Increment the lowest version when its code is removed.
"""


class Feature(IntEnum):
    """Optional parts of the protocol. `draft.proto` describes each one."""

    ROUNDS_ON_DEVICE = draft_pb2.PROTOCOL_FEATURE_ROUNDS_ON_DEVICE
    MAILBOX = draft_pb2.PROTOCOL_FEATURE_MAILBOX
    TRACE_LOGPROBS = draft_pb2.PROTOCOL_FEATURE_TRACE_LOGPROBS
    SLOTTED_ROUNDS = draft_pb2.PROTOCOL_FEATURE_SLOTTED_ROUNDS
    COMPACT_STATES = draft_pb2.PROTOCOL_FEATURE_COMPACT_STATES
    STORED_ROWS = draft_pb2.PROTOCOL_FEATURE_STORED_ROWS


VERSION_2_FEATURES = frozenset((Feature.ROUNDS_ON_DEVICE, Feature.MAILBOX, Feature.TRACE_LOGPROBS))
"""Features of a peer of version 2 that sends no range of versions. Such a peer sends no features either."""
FEATURES = frozenset(
    (
        Feature.MAILBOX,
        Feature.TRACE_LOGPROBS,
        Feature.SLOTTED_ROUNDS,
        Feature.COMPACT_STATES,
        Feature.STORED_ROWS,
    )
)
"""The features that this release supports.

A peer of version 2 has no slots (`shared.spec.resident`), so rounds with this peer run through the host.
"""


@dataclass(frozen=True, slots=True)
class VersionOffer:
    """An offer: the protocol versions and features that one side, target or draft, supports.

    Attributes:
        side: The side that makes the offer.
        min_version, max_version: Lowest and highest version, both inclusive.
        features: The supported features.
    """

    side: Side
    min_version: int
    max_version: int
    features: frozenset[Feature] = frozenset()

    @classmethod
    def ours(cls, side: Side) -> VersionOffer:
        """Return the offer of this release, as a target or as a draft."""
        return cls(side, MIN_VERSION, MAX_VERSION, FEATURES)

    @classmethod
    def of(cls, message: draft_pb2.Hello | draft_pb2.HelloAck) -> VersionOffer:
        """Read the offer in a Hello or HelloAck message of a peer.

        If a peer sends no range, it supports only its `protocol_version`. Unknown features are ignored.

        Raises:
            ProtocolError: The message contains no version or an invalid range, or its `protocol_version` is
                outside this range.
        """
        side = Side.TARGET if isinstance(message, draft_pb2.Hello) else Side.DRAFT
        single, lowest, highest = message.protocol_version, message.min_version, message.max_version
        if not lowest and not highest:
            if not single:
                raise ProtocolError(
                    f"The {side.value} sent no version of the draft protocol: update the {side.value}.",
                    field="protocol_version",
                )
            return cls(side, single, single, VERSION_2_FEATURES if single == 2 else frozenset())
        if not 1 <= lowest <= highest:
            raise ProtocolError(
                f"The {side.value} sent min_version {lowest} and max_version {highest}: min_version must be "
                f"at least 1 and at most max_version.",
                field="min_version",
            )
        if not lowest <= single <= highest:
            raise ProtocolError(
                f"The {side.value} sent protocol_version {single}, which is not one of its versions "
                f"({lowest} to {highest}): update the {side.value}.",
                field="protocol_version",
            )
        sent: Container[int] = message.protocol_features
        return cls(side, lowest, highest, frozenset(feature for feature in Feature if feature in sent))

    def write(self, message: draft_pb2.Hello | draft_pb2.HelloAck, version: int) -> None:
        """Write this offer into a Hello or HelloAck message.

        Args:
            message: The message to complete.
            version: Value of `protocol_version`. In HelloAck, it is the agreed version. In Hello, it is the
                lowest supported version, because old releases accept only their own version in Hello.
        """
        message.protocol_version = version
        message.min_version, message.max_version = self.min_version, self.max_version
        message.protocol_features.extend(
            draft_pb2.ProtocolFeature.ValueType(bit) for bit in sorted(self.features)
        )

    @property
    def versions(self) -> str:
        """The range of versions as text, for error messages."""
        if self.min_version == self.max_version:
            return f"version {self.min_version}"
        return f"versions {self.min_version} to {self.max_version}"


@dataclass(frozen=True, slots=True)
class Agreed:
    """The protocol version and the features that target and draft have agreed on.

    Attributes:
        version: The highest version that both sides support.
        features: The features that both sides support.
    """

    version: int
    features: frozenset[Feature]

    def __str__(self) -> str:
        names = ", ".join(feature.name.lower() for feature in sorted(self.features))
        return f"version {self.version}, features: {names or 'none'}"


def agree(theirs: VersionOffer, ours: VersionOffer) -> Agreed:
    """Return the highest common version and the common features of two offers.

    Target and draft get the same result.

    Raises:
        ProtocolError: There is no common version. The message names both ranges and the side to update.
    """
    version = min(theirs.max_version, ours.max_version)
    if version >= max(theirs.min_version, ours.min_version):
        return Agreed(version, theirs.features & ours.features)
    older, newer = sorted((theirs, ours), key=lambda offer: offer.max_version)
    raise ProtocolError(
        f"The {theirs.side.value} supports {theirs.versions} of the draft protocol, this {ours.side.value} "
        f"{ours.versions}. The {older.side.value} is older: update it to a release that supports version "
        f"{newer.min_version}.",
        field="protocol_version",
    )


def agree_with_ack(ack: draft_pb2.HelloAck) -> Agreed:
    """Return the protocol version and features on which this target and the sender of `ack` (a draft) agree.

    Raises:
        ProtocolError: There is no common version, or the draft did not choose the highest one.
    """
    agreed = agree(VersionOffer.of(ack), VersionOffer.ours(Side.TARGET))
    if ack.protocol_version != agreed.version:
        raise ProtocolError(
            f"The draft chose version {ack.protocol_version} of the draft protocol, but both sides support "
            f"version {agreed.version}: update the draft.",
            field="protocol_version",
        )
    return agreed
