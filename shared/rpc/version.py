"""The version of the draft protocol, which target and draft tell each other first: in Hello and HelloAck."""

from __future__ import annotations

from outrider.shared.base.errors import ProtocolError
from outrider.shared.rpc.ipc.doorbells import Side

PROTOCOL_VERSION = 2
"""Raised by whatever one release says that the release before would take for an error or for something else: a new message on a stream,
another layout of a round's blobs, another meaning of a field. A new field that may be left out raises nothing."""


def check_version(theirs: int, side: Side) -> None:
    """Check the version of a peer.

    Args:
        theirs: What it said; 0 if it said nothing.
        side: Which of the two the peer is.

    Raises:
        ProtocolError: It is another one; says which of the two is to be updated.
    """
    if theirs == PROTOCOL_VERSION:
        return
    here = Side.DRAFT if side is Side.TARGET else Side.TARGET
    older = side if theirs < PROTOCOL_VERSION else here
    raise ProtocolError(
        f"The {side.value} speaks version {theirs} of the draft protocol, this {here.value} version {PROTOCOL_VERSION}: "
        f"update the {older.value}, so that both run the same release.",
        field="protocol_version",
    )
