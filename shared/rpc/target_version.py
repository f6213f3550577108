"""Versions and features of the target's gRPC service, and how gateway and target agree on them.

A target sends its range of versions and its features in GetInfoReply. The gateway passes the reply to
`agree_with_target`, and uses only the features that both sides support.
"""

from __future__ import annotations

from collections.abc import Container
from enum import IntEnum

from outrider.shared.base.errors import ProtocolError
from outrider.target.v1 import target_pb2

MIN_TARGET_VERSION, MAX_TARGET_VERSION = 1, 1
"""Lowest and highest version of the target's service that this release supports, in targets and gateways.

Increment the highest version for any change that the previous release would reject or misread. A new optional
field needs no increment. If an older peer must not ignore the field, add a feature for it.
"""


class TargetFeature(IntEnum):
    """Optional parts of the service. `target.proto` describes each one."""

    RESUME = target_pb2.TARGET_FEATURE_RESUME
    CONSTRAINT = target_pb2.TARGET_FEATURE_CONSTRAINT
    STATES = target_pb2.TARGET_FEATURE_STATES


TARGET_FEATURES = frozenset(TargetFeature)
"""The features that this release supports."""


def offer_to(reply: target_pb2.GetInfoReply) -> None:
    """Write the versions and features of this release into a target's reply."""
    reply.min_version, reply.max_version = MIN_TARGET_VERSION, MAX_TARGET_VERSION
    reply.features.extend(target_pb2.TargetFeature.ValueType(bit) for bit in sorted(TARGET_FEATURES))


def agree_with_target(reply: target_pb2.GetInfoReply) -> frozenset[TargetFeature]:
    """Return the features that both this gateway and the target support, according to its `reply`.

    If a target sends no range of versions, it supports version 1 without features. Unknown features are
    ignored.

    Raises:
        ProtocolError: There is no common version. The message names both ranges and the side to update.
    """
    lowest, highest = reply.min_version or 1, reply.max_version or 1
    if lowest > MAX_TARGET_VERSION or highest < MIN_TARGET_VERSION:
        older, needed = ("gateway", lowest) if lowest > MAX_TARGET_VERSION else ("target", MIN_TARGET_VERSION)
        raise ProtocolError(
            f"The target supports versions {lowest} to {highest} of its service, this gateway "
            f"{MIN_TARGET_VERSION} to {MAX_TARGET_VERSION}. The {older} is older: update it to a release "
            f"that supports version {needed}.",
            field="min_version",
        )
    sent: Container[int] = reply.features
    return frozenset(feature for feature in TARGET_FEATURES if feature in sent)
